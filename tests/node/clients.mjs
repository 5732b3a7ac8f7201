// The answers of two gateways by OpenAI's and Anthropic's packages for Node.
//
//     node clients.mjs KEY LIMITED_KEY URL URL
//
// Prints a line once all streams are in the middle, when the first gateway may be killed, and at
// the end the answers and the classes of errors as one JSON object.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [key, limitedKey, ...urls] = process.argv.slice(2);
const BEGUN_EVENTS = 12;
let streamsToBegin = 3;

// Sends requests to the first gateway; one that fails becomes the last.
async function send(path, init) {
  const url = urls[0];
  try {
    return { url, response: await fetch(url + path, init) };
  } catch (error) {
    leave(url);
    throw error;
  }
}

function leave(url) {
  if (url === urls[0]) urls.push(urls.shift());
}

// As `fetch`, at whichever gateway lives; a stream goes on at another one.
async function resumingFetch(input, init) {
  const { pathname } = new URL(input);
  const headers = new Headers(init.headers);
  headers.set("x-kvlane-detach", "true"); // otherwise a lost connection cancels
  const sent = await send(pathname, { ...init, headers });
  const type = sent.response.headers.get("content-type") ?? "";
  if (!type.startsWith("text/event-stream")) return sent.response;
  return new Response(ReadableStream.from(eventsOf(sent, pathname, headers)), sent.response);
}

async function* eventsOf({ url, response }, path, headers) {
  const form = { "/v1/messages": "message", "/v1/responses": "response" }[path] ?? "chat";
  const again = `/v1/streams/${response.headers.get("x-kvlane-id")}?form=${form}`;
  const encoder = new TextEncoder();
  let last = "";
  let events = 0;
  for (;;) {
    let pending = "";
    try {
      for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
        const whole = (pending + part).split("\n\n");
        pending = whole.pop();
        for (const event of whole) {
          yield encoder.encode(`${event}\n\n`);
          last = /^id: (.*)$/m.exec(event)?.[1] ?? last;
          if (++events === BEGUN_EVENTS && --streamsToBegin === 0) console.log("begun");
        }
      }
      return;
    } catch {
      leave(url);
      const resumed = new Headers({ "last-event-id": last });
      for (const name of ["authorization", "x-api-key"])
        if (headers.has(name)) resumed.set(name, headers.get(name));
      ({ url, response } = await send(again, { headers: resumed }));
      if (response.status !== 200) throw new Error(`${response.status} of ${again}`);
    }
  }
}

const clients = (apiKey, maxRetries) => ({
  ai: new OpenAI({ baseURL: `${urls[0]}/v1`, apiKey, maxRetries, fetch: resumingFetch }),
  claude: new Anthropic({ baseURL: urls[0], apiKey, maxRetries, fetch: resumingFetch }),
});
const { ai, claude } = clients(key, 3);
const model = (await ai.models.list()).data[0].id;
const messages = [{ role: "user", content: "two" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const chatTools = [{ type: "function", function: { name: "weather", parameters } }];
const claudeTools = [{ name: "weather", input_schema: parameters }];
const responseTools = [{ type: "function", name: "weather", parameters, strict: null }];
const chatBody = { model, messages, tools: chatTools };
const claudeBody = { model, messages, tools: claudeTools, max_tokens: 500 };
const responseBody = { model, input: "two", tools: responseTools };

const ofChat = ({ choices: [{ message, finish_reason }] }) => ({
  reasoning: message.reasoning_content,
  content: message.content,
  calls: (message.tool_calls ?? []).map(({ id, function: { name, arguments: text } }) => [id, name, text]),
  reason: finish_reason,
});
const ofMessage = ({ content, stop_reason }) => ({
  reasoning: content.find((block) => block.type === "thinking")?.thinking,
  content: content.find((block) => block.type === "text")?.text,
  calls: content
    .filter((block) => block.type === "tool_use")
    .map((block) => [block.id, block.name, JSON.stringify(block.input)]),
  reason: stop_reason,
});
const ofResponse = ({ output, status }) => ({
  reasoning: output.find((item) => item.type === "reasoning")?.content[0].text,
  content: output.filter((item) => item.type === "message").map((item) => item.content[0].text).join(""),
  calls: output
    .filter((item) => item.type === "function_call")
    .map((item) => [item.call_id, item.name, item.arguments]),
  reason: status,
});

async function streamedChat() {
  const message = { content: "", reasoning_content: "", tool_calls: [] };
  let finish_reason = null;
  for await (const { choices: [choice] } of await ai.chat.completions.create({ ...chatBody, stream: true })) {
    message.content += choice.delta.content ?? "";
    message.reasoning_content += choice.delta.reasoning_content ?? "";
    for (const call of choice.delta.tool_calls ?? []) {
      if (call.id) message.tool_calls.push({ id: call.id, function: { name: call.function.name, arguments: "" } });
      message.tool_calls[call.index].function.arguments += call.function.arguments ?? "";
    }
    finish_reason = choice.finish_reason ?? finish_reason;
  }
  return ofChat({ choices: [{ message, finish_reason }] });
}

async function streamedResponse() {
  let last;
  for await (const event of await ai.responses.create({ ...responseBody, stream: true })) last = event;
  return ofResponse(last.response);
}

// Requests of each form with further fields, and the fields of the choices of tools: free, none,
// any, one by its name; and of a JSON schema.
const asked = {
  chat: async (more) => ofChat(await ai.chat.completions.create({ ...chatBody, ...more })),
  message: async (more) => ofMessage(await claude.messages.create({ ...claudeBody, ...more })),
  response: async (more) => ofResponse(await ai.responses.create({ ...responseBody, ...more })),
};
const choices = {
  chat: ["auto", "none", "required", { type: "function", function: { name: "weather" } }],
  message: [{ type: "auto" }, { type: "none" }, { type: "any" }, { type: "tool", name: "weather" }],
  response: ["auto", "none", "required", { type: "function", name: "weather" }],
};
const form = { name: "place", schema: parameters, strict: true };
const json = [{ role: "user", content: "json" }];
const formed = {
  chat: { messages: json, response_format: { type: "json_schema", json_schema: form } },
  message: { messages: json, output_config: { format: { type: "json_schema", schema: parameters } } },
  response: { input: "json", text: { format: { type: "json_schema", ...form } } },
};

// The classes of errors: a wrong key, a tenant's limit, an unknown model, a wrong field, no worker.
async function refusals(name) {
  const create = (who, more) => ({
    chat: () => who.ai.chat.completions.create({ ...chatBody, ...more }),
    message: () => who.claude.messages.create({ ...claudeBody, ...more }),
    response: () => who.ai.responses.create({ ...responseBody, ...more }),
  })[name]();
  const ours = clients(key, 0);
  const requests = [
    [clients("none", 0), {}],
    [clients(limitedKey, 0), {}],
    [ours, { model: "other" }],
    [ours, { temperature: 9 }],
    [ours, { nvext: { backend_instance_id: "gone" } }],
  ];
  return Promise.all(
    requests.map(([who, more]) =>
      create(who, more).then(
        () => "",
        (error) => `${error.constructor.name} ${error.status}`,
      ),
    ),
  );
}

const each = async (values, get) => Object.fromEntries(await Promise.all(values.map(async (name) => [name, await get(name)])));
const forms = Object.keys(asked);
const [streamed, chosen, structured] = await Promise.all([
  Promise.all([
    streamedChat(),
    claude.messages.stream(claudeBody).finalMessage().then(ofMessage),
    streamedResponse(),
  ]).then(([chat, message, response]) => ({ chat, message, response })),
  each(forms, (name) => Promise.all(choices[name].map((tool_choice) => asked[name]({ tool_choice })))),
  each(forms, (name) => asked[name](formed[name])),
]);
console.log(JSON.stringify({ streamed, chosen, structured, refusals: await each(forms, refusals) }));

// The answers of a gateway by OpenAI's and Anthropic's packages for Node, as one JSON object.
//
//     node clients.mjs URL QUESTION

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, question] = process.argv.slice(2);
const ai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const claude = new Anthropic({ baseURL: url, apiKey: "-", maxRetries: 0 });
const model = (await ai.models.list()).data[0].id;
const messages = [{ role: "user", content: question }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const chatTools = [{ type: "function", function: { name: "weather", parameters } }];
const claudeTools = [{ name: "weather", input_schema: parameters }];
const responseTools = [{ type: "function", name: "weather", parameters, strict: null }];

const ofChat = ({ choices: [{ message, finish_reason }] }) => ({
  reasoning: message.reasoning_content,
  content: message.content,
  calls: (message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
  reason: finish_reason,
});
const ofMessage = ({ content, stop_reason }) => ({
  reasoning: content.find((block) => block.type === "thinking")?.thinking,
  content: content.find((block) => block.type === "text")?.text,
  calls: content
    .filter((block) => block.type === "tool_use")
    .map((block) => [block.name, JSON.stringify(block.input)]),
  reason: stop_reason,
});
const ofResponse = ({ output, output_text, status }) => ({
  reasoning: output.find((item) => item.type === "reasoning")?.content[0].text,
  content: output_text,
  calls: output
    .filter((item) => item.type === "function_call")
    .map((item) => [item.name, item.arguments]),
  reason: status,
});

async function streamedChat() {
  const message = { content: "", reasoning_content: "", tool_calls: [] };
  let finish_reason = null;
  const body = { model, messages, tools: chatTools, stream: true };
  for await (const { choices: [choice] } of await ai.chat.completions.create(body)) {
    message.content += choice.delta.content ?? "";
    message.reasoning_content += choice.delta.reasoning_content ?? "";
    for (const call of choice.delta.tool_calls ?? []) {
      if (call.id) message.tool_calls[call.index] = { function: { name: call.function.name, arguments: "" } };
      message.tool_calls[call.index].function.arguments += call.function.arguments ?? "";
    }
    finish_reason = choice.finish_reason ?? finish_reason;
  }
  return ofChat({ choices: [{ message, finish_reason }] });
}

async function streamedResponse() {
  let last;
  const body = { model, input: question, tools: responseTools, stream: true };
  for await (const event of await ai.responses.create(body)) last = event;
  return ofResponse({ ...last.response, output_text: textOf(last.response) });
}

const textOf = ({ output }) =>
  output.filter((item) => item.type === "message").map((item) => item.content[0].text).join("");

async function refused(request) {
  try {
    await request();
    return "";
  } catch (error) {
    return `${error.constructor.name} ${error.status}`;
  }
}

// The answers by every choice of tools: free, none, any, one by its name.
const all = (bodies, create) => Promise.all(bodies.map(create));
const chosen = async () => ({
  chat: await all(
    ["auto", "none", "required", { type: "function", function: { name: "weather" } }],
    async (tool_choice) =>
      ofChat(await ai.chat.completions.create({ model, messages, tools: chatTools, tool_choice })),
  ),
  message: await all(
    [{ type: "auto" }, { type: "none" }, { type: "any" }, { type: "tool", name: "weather" }],
    async (tool_choice) => ofMessage(await claude.messages.create({ ...claudeBody, tool_choice })),
  ),
  response: await all(
    ["auto", "none", "required", { type: "function", name: "weather" }],
    async (tool_choice) =>
      ofResponse(
        await ai.responses.create({ model, input: question, tools: responseTools, tool_choice }),
      ),
  ),
});

async function formed() {
  const form = { name: "place", schema: parameters, strict: true };
  const asked = [{ role: "user", content: "json" }];
  const chat = await ai.chat.completions.create({
    model, messages: asked, n: 2, response_format: { type: "json_schema", json_schema: form },
  });
  const response = await ai.responses.create({
    model, input: "json", text: { format: { type: "json_schema", ...form } },
  });
  const message = await claude.messages.create({
    model, messages: asked, max_tokens: 500,
    output_config: { format: { type: "json_schema", schema: parameters } },
  });
  const texts = chat.choices.map((choice) => choice.message.content);
  return [...texts, response.output_text, message.content[0].text];
}

const claudeBody = { model, messages, tools: claudeTools, max_tokens: 500 };
console.log(
  JSON.stringify({
    chat: ofChat(await ai.chat.completions.create({ model, messages, tools: chatTools })),
    streamedChat: await streamedChat(),
    message: ofMessage(await claude.messages.create(claudeBody)),
    streamedMessage: ofMessage(await claude.messages.stream(claudeBody).finalMessage()),
    response: ofResponse(
      await ai.responses.create({ model, input: question, tools: responseTools }),
    ),
    streamedResponse: await streamedResponse(),
    chosen: await chosen(),
    formed: await formed(),
    refusedChat: await refused(() => ai.chat.completions.create({ model: "other", messages })),
    refusedMessage: await refused(() => claude.messages.create({ ...claudeBody, model: "other" })),
    refusedResponse: await refused(() =>
      ai.responses.create({ model, input: question, tool_choice: "required" }),
    ),
  }),
);

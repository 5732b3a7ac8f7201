// The views of requests: their list, the life of one, and the stream of decisions.
import { h, table, section, pill, facts, fieldList, number, duration, clock, day } from "./dom.js";
import { gantt, costBars, legend, shortId } from "./charts.js";

export const SHOWN = ["open", "ended", "slow", "failed"];
const seconds = (value) => duration(value === null ? null : value * 1000);

export function requestsView({ answer, route, matches, selected, go }) {
  const shown = route[1] || "open";
  const rows = answer.requests.filter((r) => matches(r.id, r.model, r.tenant, r.worker, r.code, r.service_class));
  const isOpen = shown === "open";
  const columns = [
    ["request", (r) => r.id, "id"], ["model", (r) => r.model || "–", "id"], ["tenant", (r) => r.tenant || "–", "id"],
    isOpen ? ["phase", (r) => pill(r.phase)] : ["end", (r) => pill(r.code)],
    ["worker", (r) => r.worker || "–", "id"], isOpen ? ["age", (r) => seconds(r.age_s), "n"] : ["total", (r) => duration(r.total_ms), "n"],
    ["decided", (r) => duration(r.wait_ms), "n"], ["first token", (r) => duration(r.ttft_ms), "n"], ["tokens", (r) => number(r.output_tokens), "n"],
    ["retries", (r) => (r.retries ? number(r.retries) : "–"), "n"], isOpen ? ["class", (r) => r.service_class] : ["ended (UTC)", (r) => clock(r.ended_ms), "n"],
    ["reason", (r) => r.reason, "wide"],
  ].filter(([title]) => title !== "reason" || rows.some((r) => r.reason));
  return [section("Requests", `${rows.length} shown${answer.left_out ? `, ${number(answer.left_out)} more are not` : ""}`,
    h("div", { class: "chips", role: "group", "aria-label": "Which requests" }, SHOWN.map((name) => h("button", { type: "button", "aria-pressed": String(name === shown), onclick: () => go("requests", name) }, name))),
    table(columns, rows, {
      key: (r) => r.id, selected, open: (r) => go("request", r.id), label: "Requests",
      empty: isOpen ? "No request is open." : shown === "failed" ? "No request has failed in the window." : "No request has ended in the window.",
    }))];
}

// The rows of the timeline: queue, each run by its phases, and what the reader got.
function lifeOf(steps) {
  const runs = new Map();
  const began = steps[0].at_ms, until = Math.max(...steps.map((t) => t.at_ms + (t.fields.over_ms ?? 0)));
  const marks = [], shown = [];
  const run = (t) => {
    const f = t.fields;
    const key = `${f.attempt ?? 0} ${f.phase} ${f.worker}`;
    if (!runs.has(key)) runs.set(key, { attempt: f.attempt ?? 0, phase: f.phase, worker: f.worker });
    return runs.get(key);
  };
  for (const t of steps) {
    const f = t.fields;
    if (t.name === "Assigned") run(t).assigned = t.at_ms;
    else if (t.name === "Started") run(t).started = t.at_ms;
    else if (t.name === "PrefillDone") run(t).first = t.at_ms;
    else if (t.name === "Finished") Object.assign(run(t), { finished: t.at_ms, code: f.code });
    else if (t.name === "Shown") shown.push({ from: t.at_ms, until: t.at_ms + f.over_ms, tone: "f2", title: `reader: ${f.tokens || f.chars} ${f.tokens ? "tokens" : "characters"} of attempt ${f.attempt} over ${duration(f.over_ms)}` });
    else if (t.name !== "Request" && t.name !== "Prompt") marks.push({ at: t.at_ms, tone: t.name === "Fencing" || t.name === "Fence" ? "f4" : "f6", title: `${t.name} ${f.reason ?? f.code ?? ""}` });
  }
  const list = [...runs.values()];
  const decided = Math.min(...list.map((each) => each.assigned ?? until), until);
  const rows = [{ name: "queue", spans: [{ from: began, until: decided, tone: "f6", title: `queued ${duration(decided - began)}` }] }];
  for (const each of list) {
    const end = each.finished ?? until, spans = [];
    const add = (from, to, tone, title) => from !== undefined && spans.push({ from, until: to, tone, title: `${title} ${duration(to - from)}` });
    add(each.assigned, each.started ?? end, "f1", "sent to the worker");
    add(each.started, each.first ?? end, "f3", "prefill");
    if (each.phase !== "prefill") add(each.first, end, "f0", "decode");
    rows.push({ name: `${each.attempt}${each.phase === "aggregated" ? "" : ` ${each.phase}`} · ${each.worker}`, spans, marks: each.finished && !["stop", "length", "handed_off"].includes(each.code) ? [{ at: each.finished, tone: "f4", title: `ended: ${each.code}` }] : [] });
  }
  if (shown.length) rows.push({ name: "reader", spans: shown });
  if (marks.length) rows.push({ name: "events", marks });
  return { rows, began, until, list };
}

const LIFE = [["f6", "queued"], ["f1", "sent to the worker"], ["f3", "prefill"], ["f0", "decode"], ["f2", "tokens at the reader"], ["f4", "failure, new attempt"]];

export function requestView({ answer, route, matches }) {
  const { steps, ending, wait } = answer;
  if (!steps.length) return [section(route[1], "", h("p", { class: "empty" }, "No record has this id: it is wrong, or older than the log (the ledger is kept for a day)."))];
  const { rows, began, until, list } = lifeOf(steps);
  const request = steps.find((t) => t.name === "Request")?.fields ?? {};
  const done = steps.findLast((t) => t.name === "Finished")?.fields ?? {};
  const first = Math.min(...list.map((each) => each.first ?? Infinity));
  return [
    section(h("span", { class: "mono" }, answer.id), `lane ${answer.lane}`, facts([
      ["began (UTC)", day(began)], ["model", request.model], ["tenant", request.tenant], ["class", request.service_class], ["prompt tokens", request.prompt_tokens && number(request.prompt_tokens)],
      ["output tokens", done.output_tokens && number(done.output_tokens)], ["cached tokens", done.cached_tokens !== undefined ? number(done.cached_tokens) : undefined],
      ["first token", Number.isFinite(first) ? duration(first - began) : undefined], ["total", duration(until - began)], ["attempts", number(new Set(list.map((each) => each.attempt)).size || 0)],
      ["end", ending ? ending : h("span", {}, pill("open", "warn"))],
    ]), wait && h("p", { class: "why bad" }, wait)),
    section("Life", "by the broker's clock", gantt(rows, began, until), legend(LIFE)),
    ...steps.filter((t) => t.reasons).map((t) => section(`Decision: ${t.fields.worker}`, `attempt ${t.fields.attempt ?? 0}, ${t.fields.phase}, +${duration(t.at_ms - began)}`, decisionParts(reasonsOf(t)))),
    section("Records", `${steps.length}, without texts and tokens`, table([
      ["after", (t) => `+${duration(t.at_ms - began)}`, "n"], ["record", (t) => t.name], ["place", (t) => `${t.topic}/${t.partition}:${t.offset}`, "id"], ["fields", (t) => fieldList(t.fields), "wide"],
    ], steps.filter((t) => matches(t.name, t.topic, JSON.stringify(t.fields))), {})),
  ];
}

// The decision of a timeline in the form of the stream of decisions.
function reasonsOf({ fields, reasons, actual, cordoned }) {
  const all = [reasons.chosen, ...reasons.others].sort((a, b) => a.cost - b.cost);
  const candidates = all.map((each) => ({
    ...each, is_chosen: each.worker === reasons.chosen.worker && (each.rank ?? 0) === (reasons.chosen.rank ?? 0), open_runs: each.inputs.open_runs ?? 0,
    open_tokens: each.inputs.open_tokens ?? 0, waiting_tokens: each.inputs.prefill_tokens ?? 0,
  }));
  return { ...fields, ...reasons, runner_up: reasons.others[0]?.worker ?? "", candidates, actual, cordoned };
}

function decisionParts(d) {
  const names = Object.keys(d.candidates[0]?.terms ?? {});
  const value = (v) => number(v, Math.abs(v) < 100 ? 2 : 0);
  return [
    h("p", { class: "why" }, d.words || "No inputs are recorded."), d.choice && h("p", { class: "why" }, d.choice),
    d.cordoned?.length ? h("p", { class: "why" }, `Cordoned: ${d.cordoned.join(", ")}`) : null,
    facts([["policy", d.policy], ["runner-up", d.runner_up], ["lost by", d.lost_by !== null && d.lost_by !== undefined ? `${value(d.lost_by)} ${d.unit}${d.lost_in ? `, mostly ${d.lost_in}` : ""}` : undefined],
      ["held in the queue", d.held_ms ? duration(d.held_ms) : undefined], ["cached, expected", d.cached_tokens_predicted !== undefined ? `${number(d.cached_tokens_predicted)} of ${number(d.prompt_tokens)} tokens` : undefined],
      ["cached, actual", d.actual?.cached_tokens !== null && d.actual ? `${number(d.actual.cached_tokens)} tokens` : undefined],
      ["first token, expected", d.ttft_ms_predicted ? duration(d.ttft_ms_predicted) : undefined], ["first token, actual", d.actual?.ttft_ms ? duration(d.actual.ttft_ms) : undefined]]),
    d.candidates.length ? [h("h3", {}, `Costs${d.unit ? ` in ${d.unit}` : ""}, by term`), costBars(d.candidates.slice(0, 8), d.unit), table([
      ["worker", (c) => `${c.worker}${c.rank ? `/${c.rank}` : ""}${c.is_chosen ? " (chosen)" : ""}`, "id"], ["cost", (c) => value(c.cost), "n"],
      ...names.map((name) => [name, (c) => value(c.terms[name] ?? 0), "n"]), ["cached tokens", (c) => number(c.cached_tokens), "n"],
      ["open runs", (c) => number(c.open_runs), "n"], ["open tokens", (c) => number(c.open_tokens), "n"], ["waiting tokens", (c) => number(c.waiting_tokens), "n"],
    ], d.candidates, { key: (c) => `${c.worker}/${c.rank}` })] : null,
  ];
}

export function decisionsView({ decisions, selected, choose, matches, go }) {
  const shown = decisions.filter((d) => matches(d.id, d.worker, d.runner_up, d.policy, d.words));
  const chosen = shown.find((d) => String(d.number) === selected) ?? shown[0];
  return [h("div", { class: "split" },
    section("Decisions", "the newest first", table([
      ["time (UTC)", (d) => clock(d.at_ms), "n"], ["request", (d) => shortId(d.id), "mono tight"], ["worker", (d) => `${d.worker}${d.rank ? `/${d.rank}` : ""}`, "mono tight"],
      ["runner-up", (d) => d.runner_up || "–", "mono tight"], ["lost by", (d) => (d.lost_by === null ? "–" : `${number(d.lost_by, Math.abs(d.lost_by) < 1 ? 3 : 1)} ${d.unit}`), "n"], ["in", (d) => d.lost_in || "–"],
    ], shown.slice(0, 60), { key: (d) => String(d.number), selected: chosen && String(chosen.number), open: (d) => choose(String(d.number)), empty: "No decision was made in the window.", label: "Decisions" })),
    chosen ? section(h("span", {}, "Why ", h("span", { class: "mono" }, chosen.worker)), `${chosen.phase}, attempt ${chosen.attempt}`, decisionParts(chosen),
      h("p", {}, h("button", { type: "button", onclick: () => go("request", chosen.id) }, "Life of this request"))) : section("Why", ""))];
}

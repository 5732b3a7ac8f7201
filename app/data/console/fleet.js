// The views of the fleet: workers and models, charts, queues and jobs, alarms.
import { h, table, section, pill, bar, number, share, duration, day } from "./dom.js";
import { lineChart, spark } from "./charts.js";

const SPARKS = 60;
const sparks = new Map();

// Note the KV use of each worker, once for each frame.
export function noteWorkers(workers) {
  const known = new Set(workers.map((each) => each.id));
  for (const id of sparks.keys()) if (!known.has(id)) sparks.delete(id);
  for (const { id, kv_use: use } of workers) {
    const values = sparks.get(id) ?? [];
    values.push(use ?? 0);
    if (values.length > SPARKS) values.shift();
    sparks.set(id, values);
  }
}

const tile = (name, value, note) => h("div", { class: "tile" }, h("span", {}, name), h("b", {}, value), note && h("small", {}, note));
const latest = (points, field) => points.slice(-3).map((p) => p[field]).findLast((v) => v !== null && v !== undefined);
const sum = (rows, field) => rows.reduce((total, row) => total + (row[field] ?? 0), 0);

export function fleetView({ frame, matches, selected, go }) {
  const { status, workers, points } = frame;
  const ready = status.workers.ready ?? 0;
  const whole = points.length > 1 ? points.slice(0, -1) : points;
  const blocks = sum(workers, "kv_blocks");
  const shown = workers.filter((w) => matches(w.id, w.model, w.role, w.state, w.order));
  return [
    h("div", { class: "tiles" },
      tile("Workers ready", `${ready}`, `of ${workers.length}`), tile("Running", number(sum(workers, "running")), "in engines"),
      tile("Queued", number(status.requests.queued ?? 0), "requests"), tile("Answers", number(latest(whole, "ended_rate") ?? 0, 1), "a second"),
      tile("First token, p95", duration(latest(whole, "ttft_p95"))), tile("Cache hits", share(latest(points, "hit_rate")), "of prompts"),
      tile("KV cache used", blocks ? share(sum(workers, "kv_used_blocks") / blocks) : "–"), tile("Alarms", `${status.alarms.length}`)),
    section("Workers", `${shown.length} of ${workers.length}`, table([
      ["worker", (w) => w.id, "id"], ["state", (w) => [pill(w.state), w.order && [" ", pill(w.order)]]], ["model", (w) => w.model, "id"], ["role", (w) => w.role],
      ["running", (w) => number(w.running), "n"], ["waiting", (w) => number(w.waiting), "n"],
      ["KV blocks in use", (w) => bar(w.kv_use, w.kv_blocks ? `${number(w.kv_used_blocks)} / ${number(w.kv_blocks)}` : undefined)],
      ["last minute", (w) => spark(sparks.get(w.id) ?? [])], ["hits", (w) => share(w.hit_rate), "n"], ["step", (w) => duration(w.step_ms), "n"],
      ["TTFT error", (w) => share(w.ttft_error), "n"], ["heartbeat", (w) => duration(w.heartbeat_age_s === null ? null : w.heartbeat_age_s * 1000), "n"],
      ["reason", (w) => w.reason],
    ].filter(([title]) => title !== "reason" || shown.some((w) => w.reason)), shown, { key: (w) => w.id, selected, open: (w) => go("requests", "open", w.id), empty: "No worker is registered.", label: "Workers" })),
    section("Models", "", table([
      ["model", (m) => m.name, "id"], ["ready", (m) => `${m.ready} of ${m.workers}`, "n"], ["open", (m) => number(m.open), "n"], ["queued", (m) => number(m.queued), "n"],
      ["context", (m) => number(m.context_length), "n"], ["engines", (m) => m.versions.join(", ")], ["tokenizer", (m) => m.tokenizer.slice(0, 12), "id"],
    ], status.models.filter((m) => matches(m.name)), { key: (m) => m.name, empty: "No model is registered." })),
    section("Topics", "records a second, and what is unread", table([
      ["topic", (t) => t.name, "id"], ["records/s", (t) => number(t.rate, 1), "n"], ["unread", (t) => number(t.lag), "n"],
      ["for a minute", (t) => (t.late ? h("b", { class: "bad" }, number(t.late)) : number(t.late)), "n"],
    ], status.topics.filter((t) => (t.rate || t.lag) && matches(t.name)), { key: (t) => t.name, empty: "No record was appended in the last second." })),
  ];
}

export function chartsView({ frame }) {
  const points = frame.points;
  const times = points.map((p) => p.at_ms);
  const of = (field) => points.map((p) => p[field]);
  const rate = (v) => number(v, 1), count = (v) => number(v);
  return [h("div", { class: "charts" },
    lineChart("Requests a second", times, [{ name: "answered", tone: "s0", values: of("ended_rate") }, { name: "failed", tone: "s4", values: of("failed_rate") }], rate),
    lineChart("Time to first token", times, [{ name: "p50", tone: "s0", values: of("ttft_p50") }, { name: "p95", tone: "s1", values: of("ttft_p95") }], duration),
    lineChart("Time between tokens", times, [{ name: "p50", tone: "s0", values: of("itl_p50") }, { name: "p95", tone: "s1", values: of("itl_p95") }], duration),
    lineChart("Open requests", times, [{ name: "with a worker", tone: "s0", values: of("running") }, { name: "queued", tone: "s1", values: of("queued") }], count),
    lineChart("Cache hits", times, [{ name: "share of prompt tokens", tone: "s2", values: of("hit_rate") }], share, 1),
    lineChart("KV cache", times, [{ name: "blocks in use", tone: "s6", values: of("kv_use") }], share, 1)),
  h("p", { class: "soft" }, "Points of 5 s, the last one incomplete; times from the append of a request, of answered ones. Cache hits and KV cache: mean of the workers, while a page is open."),
  ];
}

export function queueView({ answer, matches }) {
  const { lanes, waits, backlog, jobs } = answer;
  return [
    section("Lanes", "requests that wait for a worker", table([
      ["lane", (l) => number(l.lane), "n"], ["router", (l) => l.router || pill("none", "bad"), "id"], ["unread", (l) => number(l.unread), "n"],
      ["interactive", (l) => number(l.queued), "n"], ["batch", (l) => number(l.queued_batch), "n"], ["oldest", (l) => duration(l.oldest_s === null ? null : l.oldest_s * 1000), "n"],
    ], lanes.filter((l) => matches(l.router, String(l.lane))), { key: (l) => `lane ${l.lane}` })),
    section("Reasons of waits", "of requests that have waited for ten seconds", table([
      ["requests", (w) => number(w.requests), "n"], ["reason", (w) => w.reason, "wide"],
    ], waits, { empty: "No request has waited for ten seconds." })),
    section("Backlog", "prompts that no preprocessor has passed on, requests that no router has read", table([
      ["topic", (t) => t.name, "id"], ["unread", (t) => number(t.lag), "n"], ["for a minute", (t) => number(t.late), "n"], ["records/s", (t) => number(t.rate, 1), "n"],
    ], backlog, { key: (t) => t.name })),
    section("Batch jobs", "those that have not ended", table([
      ["job", (j) => j.id, "id"], ["tenant", (j) => j.tenant || "–", "id"], ["status", (j) => pill(j.status)],
      ["done", (j) => bar(j.lines ? (j.completed + j.failed) / j.lines / 1.06 : 0, `${number(j.completed + j.failed)} / ${number(j.lines)}`)],
      ["published", (j) => number(j.published), "n"], ["failed", (j) => number(j.failed), "n"], ["created (UTC)", (j) => day(j.created_s * 1000)],
    ], jobs.filter((j) => matches(j.id, j.tenant, j.status)), { key: (j) => j.id, empty: "No batch job is open." })),
  ];
}

export function alarmsView({ frame, matches }) {
  const { alarms, dead_letters: letters } = frame.status;
  return [section("Alarms", "as of kvlane status", table([
    ["about", (a) => pill(a.kind, "bad")], ["name", (a) => a.name, "id"], ["what", (a) => a.message, "wide"],
  ], alarms.filter((a) => matches(a.kind, a.name, a.message)), { key: (a) => `${a.kind} ${a.name}`, empty: "No alarm: workers send heartbeats, each model has a ready worker, each lane a router; nothing is late." })),
  section("Dead letters", "records of the last minutes that could not be processed", h("p", { class: letters ? "bad" : "empty" }, letters ? [`${number(letters)}: `, h("code", {}, "kvlane dead-letters list")] : "none"))];
}

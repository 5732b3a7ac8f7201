// The console: routes, keyboard, and the poll of the gateway's JSON, one question at a time.
import { h, patch, clean, duration } from "./dom.js";
import { fleetView, chartsView, queueView, alarmsView, noteWorkers } from "./fleet.js";
import { requestsView, requestView, decisionsView, SHOWN } from "./requests.js";

const POLL_MS = 1000, TIMEOUT_MS = 25_000, MAX_DECISIONS = 200, KEY = "kvlane-console-key";
const TABS = [["fleet", "Fleet"], ["requests", "Requests"], ["decisions", "Decisions"], ["charts", "Charts"], ["queue", "Queue"], ["alarms", "Alarms"]];
const VIEWS = { fleet: fleetView, requests: requestsView, request: requestView, decisions: decisionsView, charts: chartsView, queue: queueView, alarms: alarmsView };
const $ = (id) => document.getElementById(id);

const state = { frame: null, answer: null, answered: "", decisions: [], lastDecision: 0, selected: {}, paused: false, reader: null, error: null };
let timer, round = 0;

// --- routes ---

function routeOf() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return ""; }
  });
  return VIEWS[parts[0]] ? parts : ["fleet"];
}

function go(...parts) {
  const filter = parts[0] === "requests" ? parts[2] : undefined;
  $("filter").value = filter ?? "";
  location.hash = `#/${parts.slice(0, 2).map(encodeURIComponent).join("/")}`;
}

// --- the gateway ---

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(`api/${path}`, {
    headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body.error?.message ?? `the gateway answered ${answer.status}`);
  return body;
}

async function askView(route) {
  const [name, of] = route;
  if (name === "requests") return ask(`requests?shown=${encodeURIComponent(SHOWN.includes(of) ? of : "open")}`);
  if (name === "request") return ask(`requests/${encodeURIComponent(of)}`);
  if (name === "queue") return ask("queue");
  if (name === "decisions") {
    const found = await ask(`decisions?after=${state.lastDecision}`);
    if (found.last < state.lastDecision) state.decisions = []; // its reader has begun again
    state.lastDecision = found.last;
    state.decisions = [...found.decisions, ...state.decisions].slice(0, MAX_DECISIONS);
    return found;
  }
  return null;
}

// A life that has ended does not change; to look for an id without records reads a whole lane.
const isSettled = (route) => route[0] === "request" && state.answered === location.hash
  && (state.answer?.ending || !state.answer?.steps?.length);

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // the reader of the gateway ends without questions
  const mine = ++round, route = routeOf(), hash = location.hash;
  try {
    const frame = await ask("fleet");
    if (mine !== round) return;
    state.reader = frame.reader;
    if (frame.workers) {
      state.frame = frame;
      noteWorkers(frame.workers);
    }
    if (!isSettled(route)) {
      const answer = await askView(route);
      if (mine !== round) return;
      Object.assign(state, { answer, answered: hash });
    }
    state.error = null;
  } catch (error) {
    if (mine !== round) return;
    state.error = error;
    if (error instanceof Refused && (error.status === 401 || error.status === 403) && !$("key-dialog").open) openKey();
  }
  try {
    show();
  } finally {
    schedule();
  }
}

function schedule() {
  clearTimeout(timer);
  if (!state.paused) timer = setTimeout(poll, state.error ? 3 * POLL_MS : POLL_MS);
}

// --- the page ---

function matcher() {
  const wanted = $("filter").value.trim().toLowerCase();
  return (...texts) => !wanted || texts.some((text) => String(text ?? "").toLowerCase().includes(wanted));
}

function show() {
  const route = routeOf(), [name] = route;
  const tab = name === "request" ? "requests" : name;
  const alarms = state.frame?.status.alarms.length ?? 0;
  patch($("tabs"), h("nav", {}, TABS.map(([id, title], i) => h("button", {
    type: "button", role: "tab", "data-key": id, id: `tab-${id}`, "aria-selected": String(id === tab), "aria-controls": "panel", tabindex: id === tab ? "0" : "-1", title: String(i + 1), onclick: () => go(id),
  }, title, id === "alarms" && alarms ? h("b", { "aria-label": `${alarms} alarms` }, alarms) : null))));
  $("panel").setAttribute("aria-labelledby", `tab-${tab}`);
  document.title = `${alarms ? `(${alarms}) ` : ""}${TABS.find(([id]) => id === tab)[1]} – kvlane console`;
  showState();
  const needsAnswer = ["requests", "request", "queue"].includes(name);
  const isThere = name === "request" ? state.answer?.steps : name === "requests" ? state.answer?.requests : state.answer?.lanes;
  const wanted = document.createElement("main");
  const isAnswered = needsAnswer ? state.answered === location.hash && isThere : state.frame;
  const parts = isAnswered
    ? VIEWS[name]({ frame: state.frame, answer: state.answer, decisions: state.decisions, route, matches: matcher(), selected: state.selected[name], choose, go })
    : [h("section", {}, h("p", { class: "empty" }, waiting()))];
  wanted.append(...parts.flat(Infinity).filter(Boolean));
  patch($("panel"), wanted);
}

function waiting() {
  const { done = 0, total = 0 } = state.reader ?? {};
  if (state.error || state.reader?.state === "failed") return "No data.";
  return total ? `Reading the last minutes: ${done} of ${total} records` : "Reading the last minutes …";
}

function showState() {
  const { reader, error, frame, paused } = state;
  const failed = error ?? (reader?.state === "failed" ? new Error(`${reader.message}. ${reader.correction}`) : null);
  const isLive = reader?.state === "live" && !error && !paused;
  const words = paused ? "paused" : error ? "no answer" : isLive ? `${new Date(frame.now_ms).toISOString().slice(11, 19)} UTC` : (reader?.state ?? "connecting");
  if ($("state").textContent !== words) $("state").textContent = words;
  $("state").className = isLive ? "live" : "off";
  $("state").title = frame ? `records since ${duration(frame.now_ms - frame.since_ms)} ago` : "";
  $("pause").textContent = paused ? "Continue" : "Pause";
  $("notice").hidden = !failed;
  if (failed) $("notice").textContent = clean(failed.message);
}

function choose(key) {
  state.selected[routeOf()[0]] = key;
  show();
}

// --- keyboard ---

const rows = () => [...document.querySelectorAll("#panel tr.row")];

function move(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.getAttribute("aria-selected") === "true");
  const next = all[Math.max(0, Math.min(all.length - 1, at + by))];
  choose(next.dataset.key);
  const row = rows().find((each) => each.dataset.key === next.dataset.key);
  row?.focus();
  row?.scrollIntoView({ block: "nearest" });
}

function pause() {
  state.paused = !state.paused;
  show();
  if (!state.paused) poll();
}

function openKey() {
  $("key-input").value = "";
  $("key-dialog").showModal();
  $("key-input").focus();
}

const ACTIONS = {
  j: () => move(1), k: () => move(-1), p: pause, "?": () => $("help-dialog").showModal(),
  "/": () => $("filter").focus(), o: () => go("requests", "open"), e: () => go("requests", "ended"), s: () => go("requests", "slow"), f: () => go("requests", "failed"),
  Escape: () => {
    if ($("filter").value) { $("filter").value = ""; show(); } else if (routeOf()[0] === "request") history.back();
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const inField = event.target.matches("input, select");
  if (inField) {
    if (event.key === "Escape") { event.target.value = ""; event.target.blur(); show(); }
    if (event.key === "Enter" && event.target.value.trim()) {
      const id = event.target.value.trim();
      event.target.blur();
      if (rows().length) move(0); else go("request", id);
    }
    return;
  }
  if (event.target.matches("[role=tab]") && /^Arrow(Left|Right)$/.test(event.key)) {
    const at = TABS.findIndex(([id]) => `tab-${id}` === event.target.id);
    const next = TABS[(at + (event.key === "ArrowRight" ? 1 : TABS.length - 1)) % TABS.length][0];
    go(next);
    $(`tab-${next}`).focus();
    return;
  }
  if (event.key === "Enter" && event.target.matches("tr.row")) { event.target.click(); return; }
  const action = /^[1-6]$/.test(event.key) ? () => go(TABS[Number(event.key) - 1][0]) : ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

window.addEventListener("hashchange", () => { show(); scrollTo(0, 0); poll(); });
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : !state.paused && poll()));
$("filter").addEventListener("input", show);
$("pause").addEventListener("click", pause);
$("help").addEventListener("click", () => $("help-dialog").showModal());
$("key").addEventListener("click", openKey);
$("key-dialog").addEventListener("close", () => {
  const key = $("key-input").value.trim();
  $("key-input").value = "";
  if ($("key-dialog").returnValue === "forget") sessionStorage.removeItem(KEY);
  else if (key) sessionStorage.setItem(KEY, key);
  else return;
  Object.assign(state, { frame: null, answer: null, decisions: [], lastDecision: 0 });
  poll();
});

show();
poll();

// Charts as SVG: lines over time, bars of cost terms, and the timeline of a request.
import { h, s, clean, number, duration, clock } from "./dom.js";

const WIDTH = 460, HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 20;

// A round number at or above the greatest value.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((step) => step * power).find((each) => each >= value * 0.999);
}

// Lines over the same times. `lines`: {name, tone, values}; null values are gaps.
export function lineChart(title, times, lines, format, most) {
  const known = lines.flatMap((line) => line.values).filter((v) => v !== null && v !== undefined);
  const top = most ?? ceiling(Math.max(0, ...known));
  const from = times[0], until = times[times.length - 1] || 1;
  const x = (at) => LEFT + ((at - from) / Math.max(1, until - from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
  const last = (line) => line.values.findLast((v) => v !== null && v !== undefined);
  const words = lines.map((line) => `${line.name} ${known.length ? format(last(line)) : "–"}`).join(", ");
  const drawn = [0, 0.5, 1].flatMap((part) => [
    s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(top * part), y2: y(top * part) }),
    s("text", { x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, format(top * part)),
  ]);
  for (const [at, anchor] of [[from, "start"], [(from + until) / 2, "middle"], [until, "end"]]) {
    drawn.push(s("text", { x: x(at), y: HEIGHT - 4, "text-anchor": anchor }, clock(at)));
  }
  for (const { values, tone } of lines) {
    let path = "", pen = false;
    values.forEach((value, i) => {
      if (value === null || value === undefined) { pen = false; return; }
      const alone = !pen && (values[i + 1] ?? null) === null;
      path += `${pen ? "L" : "M"}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}${alone ? "h2" : ""}`;
      pen = true;
    });
    if (path) drawn.push(s("path", { class: `line ${tone}`, d: path }));
  }
  if (!known.length) drawn.push(s("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no values yet"));
  times.forEach((at, i) => {
    const width = (WIDTH - LEFT - RIGHT) / Math.max(1, times.length - 1);
    const told = lines.map((line) => `${line.name} ${format(line.values[i])}`).join("\n");
    drawn.push(s("rect", { x: x(at) - width / 2, y: TOP, width, height: HEIGHT - TOP - BOTTOM, fill: "transparent" }, s("title", {}, `${clock(at)}  ${told.replaceAll("\n", ", ")}`)));
  });
  const chart = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${words}` }, drawn);
  return h("section", {}, h("h2", {}, title), chart, legend(lines.map((line) => [line.tone.replace("s", "f"), `${line.name} ${format(last(line))}`])));
}

export const legend = (entries) =>
  h("div", { class: "legend" }, entries.map(([tone, name]) => h("span", {}, h("i", { class: tone }), name)));

export function spark(values) {
  const points = values.map((v, i) => `${(i / Math.max(1, values.length - 1)) * 80},${17 - Math.min(1, v) * 16}`);
  return s("svg", { class: "spark", viewBox: "0 0 80 18", "aria-hidden": "true" }, points.length > 1 && s("polyline", { class: "line s0", points: points.join(" ") }));
}

// Costs of candidates as stacked bars of their terms. A negative term is named, not drawn.
export function costBars(candidates, unit) {
  const names = Object.keys(candidates[0]?.terms ?? {});
  const total = (each) => (names.length ? names.reduce((sum, name) => sum + Math.max(0, each.terms[name] ?? 0), 0) : Math.max(0, each.cost));
  const most = Math.max(...candidates.map(total), 1e-9);
  const row = 26, left = 130, width = 480, height = candidates.length * row + 4;
  const drawn = candidates.map((each, i) => {
    let x = left;
    const y = i * row + 4;
    const parts = (names.length ? names.map((name) => [name, each.terms[name]]) : [["cost", each.cost]]).map(([name, value], t) => {
      const size = (Math.max(0, value) / most) * (width - left - 80);
      const rect = s("rect", { class: `f${t % 8}`, x, y, width: size.toFixed(1), height: row - 10 }, s("title", {}, `${name} ${number(value, 2)}`));
      x += size;
      return rect;
    });
    const name = `${each.is_chosen ? "▶ " : ""}${short(each.worker, 15)}${each.rank ? `/${each.rank}` : ""}`;
    return [
      s("text", { class: each.is_chosen ? "strong" : "", x: left - 8, y: y + 12, "text-anchor": "end", "font-weight": each.is_chosen ? 600 : 400 }, name), parts,
      s("text", { x: x + 6, y: y + 12 }, `${number(each.cost, each.cost < 100 ? 2 : 0)} ${unit}`),
    ];
  });
  const words = candidates.map((each) => `${each.worker} ${number(each.cost, 2)}${each.is_chosen ? ", chosen" : ""}`).join("; ");
  return h("div", {}, s("svg", { class: "costs", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Costs in ${unit || "no unit"}: ${words}` }, drawn), names.length ? legend(names.map((name, t) => [`f${t % 8}`, name])) : null);
}

// An id by its beginning and its end, which differ.
export function shortId(id) {
  return h("span", { title: id }, id.length > 20 ? `${clean(id.slice(0, 8))}…${clean(id.slice(-8))}` : id);
}

export function short(text, most) {
  const shown = clean(text);
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

// Rows of spans over time. `rows`: {name, spans: [{from, until, tone, title}], marks: [{at, title}]}.
export function gantt(rows, from, until) {
  const row = 26, left = 168, width = 900, height = rows.length * row + 26;
  const span = Math.max(1, until - from);
  const x = (at) => left + ((at - from) / span) * (width - left - 12);
  const drawn = [0, 0.25, 0.5, 0.75, 1].flatMap((part) => {
    const at = from + span * part;
    return [
      s("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }),
      s("text", { x: x(at), y: height - 6, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, part ? `+${duration(at - from)}` : "0"),
    ];
  });
  rows.forEach(({ name, spans = [], marks = [] }, i) => {
    const y = i * row + 5;
    drawn.push(s("text", { class: "strong", x: left - 8, y: y + 12, "text-anchor": "end" }, short(name, 24)));
    for (const each of spans) {
      drawn.push(s("rect", { class: each.tone, x: x(each.from).toFixed(1), y, width: Math.max(2, x(each.until) - x(each.from)).toFixed(1), height: row - 10, rx: 2 }, s("title", {}, each.title)));
    }
    for (const each of marks) {
      drawn.push(s("path", { class: each.tone, d: `M${x(each.at).toFixed(1)} ${y - 2}l5 10l-5 10l-5 -10z` }, s("title", {}, each.title)));
    }
  });
  const words = rows.map((each) => `${each.name}: ${[...(each.spans ?? []), ...(each.marks ?? [])].map((one) => one.title).join(", ")}`).join("; ");
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Timeline. ${words}` }, drawn);
}

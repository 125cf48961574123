// The view of limits: a slider with a histogram for each limit, and what the moved limits would keep.

import { $, breakable, copyButton, el, number, plural, post, request, show, signed, svg, whole } from "./dom.js";

const STEPS = 1000;
const POLL_MS = 400;
const WAIT_MS = 90;
const state = { started: false, facts: null, moved: new Map(), drawn: new Map(), timer: 0, controller: null };

/** Read the sample if this is the first visit, and show the sliders. */
export async function openLimits() {
  if (state.started) return;
  state.started = true;
  show($("limits-message"), "");
  try {
    for (;;) {
      const value = await request("/api/limits");
      if (!value.loading) {
        state.facts = value;
        break;
      }
      $("sample-note").textContent = `Reading signals: ${whole(value.rows_read)} of ${plural(value.rows_total, "document")}…`;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  } catch (error) {
    state.started = false;
    $("sample-note").textContent = "";
    show($("limits-message"), error.message);
    return;
  }
  describeSample();
  const sliders = state.facts.sliders.map(drawSlider);
  $("sliders").replaceChildren(...sliders);
  $("fixed-limits").textContent = state.facts.fixed.length ? `Without a slider, since the limit is a quantile of all documents: ${state.facts.fixed.join(", ")}. Use penstock whatif.` : "";
  $("slider-filter").oninput = filterSliders;
  $("reset-limits").onclick = () => {
    for (const name of [...state.moved.keys()]) state.drawn.get(name).reset();
  };
  ask();
}

function describeSample() {
  const facts = state.facts;
  const first = facts.exact
    ? `Counts are exact: all ${plural(facts.population, "document")} with signals are in memory.`
    : `Estimates from a sample of ${whole(facts.sample)} of ${plural(facts.population, "document")} with signals, with 95 % sampling errors.`;
  const parts = facts.parts_read < facts.parts ? ` The sample is from ${facts.parts_read} of ${plural(facts.parts, "part")}; differences between parts are not in the errors.` : "";
  const repeats = facts.repeats ? " Cuts of repeated passages are not predicted." : "";
  $("sample-note").textContent = `${first}${parts} All counts are before deduplication.${repeats}`;
}

function filterSliders() {
  const filter = $("slider-filter").value.trim().toLowerCase();
  for (const slider of state.facts.sliders) {
    const text = `${slider.rule} ${slider.setting} ${slider.column} ${slider.meaning}`.toLowerCase();
    state.drawn.get(slider.id).node.hidden = !text.includes(filter);
  }
}

// The axis: the same functions of a position 0..1 as in the server.

const scaled = (axis, value) => (axis.knee === null ? value - axis.low : Math.log1p((value - axis.low) / axis.knee));
const position = (axis, value) => Math.min(1, Math.max(0, scaled(axis, value) / scaled(axis, axis.high)));

function valueAt(slider, share) {
  const { low, high, knee } = slider.axis;
  const value = knee === null ? low + share * (high - low) : low + knee * Math.expm1(share * Math.log1p((high - low) / knee));
  if (slider.whole) return Math.round(value);
  const digits = Math.max(0, Math.min(12, 3 - Math.floor(Math.log10((high - low) / 10 || 1))));
  return Number(Number(value.toPrecision(3)).toFixed(digits));
}

function histogram(slider) {
  const most = Math.max(1, ...slider.bins.map((bin) => bin.kept + bin.here + bin.other));
  const width = 1000 / slider.bins.length;
  const height = (count) => (count ? Math.max(1.4, 60 * Math.cbrt(count / most)) : 0);
  const bars = slider.bins.flatMap((bin, index) => {
    const total = bin.kept + bin.here + bin.other;
    let top = 62;
    return ["kept", "here", "other"].filter((kind) => bin[kind]).map((kind) => {
      const part = (height(total) * bin[kind]) / total;
      top -= part;
      return svg("rect", { class: kind, x: index * width + 0.6, width: width - 1.2, y: top, height: part });
    });
  });
  const at = 1000 * position(slider.axis, slider.limit);
  const limit = svg("line", { class: "limit", x1: at, x2: at, y1: 0, y2: 62, "vector-effect": "non-scaling-stroke" });
  const tried = svg("line", { class: "tried", x1: at, x2: at, y1: 0, y2: 62, "vector-effect": "non-scaling-stroke", visibility: "hidden" });
  const base = svg("line", { class: "base", x1: 0, x2: 1000, y1: 62.5, y2: 62.5, "vector-effect": "non-scaling-stroke" });
  const title = svg("title");
  title.textContent = `Histogram of ${slider.column}: ${plural(slider.compared, "document")} with a value, ${whole(slider.broken)} beyond the limit`;
  return { tried, node: svg("svg", { viewBox: "0 0 1000 64", preserveAspectRatio: "none", role: "img" }, title, ...bars, base, limit, tried) };
}

function drawSlider(slider) {
  const chart = histogram(slider);
  const side = slider.side === "min" ? "minimum" : "maximum";
  const name = `${slider.setting}${slider.label ? ` ${slider.label}` : ""}`;
  const range = el("input", { type: "range", min: 0, max: STEPS, step: 1, value: Math.round(STEPS * position(slider.axis, slider.limit)) });
  range.setAttribute("aria-label", `${side} of ${slider.column}`);
  const entry = el("input", { type: "number", step: "any", value: String(Number(slider.limit.toPrecision(6))) });
  entry.setAttribute("aria-label", `${name}, exact value`);
  const reset = el("button", { type: "button", className: "plain", textContent: "reset", hidden: true });
  const several = slider.limits[0] !== slider.limits[1];
  const current = several ? `${number(slider.limits[0])} to ${number(slider.limits[1])} by language${slider.limit_language ? `, ${slider.limit_language} ${number(slider.limit)}` : ""}` : number(slider.limit);
  const unit = slider.column_unit && !["ratio", "0..1"].includes(slider.column_unit) ? ` ${slider.column_unit}` : "";
  const node = el(
    "fieldset",
    { className: "slider", attrs: { "data-slider": slider.id } },
    el("h3", { title: slider.setting }, name),
    el("p", { className: "meaning" }, `${slider.rule.split("/")[1]}: ${slider.meaning}. `, el("span", { title: slider.column_meaning || "" }, `Compares ${slider.column}.`)),
    chart.node,
    range,
    el("div", { className: "ends" }, el("span", {}, number(slider.axis.low)), el("span", {}, `${number(slider.axis.high)}${unit}`)),
    el("div", { className: "entry" }, el("label", {}, `${side} `, entry), el("span", {}, `now ${current}; drops ${whole(slider.dropped)}`), reset),
  );
  const move = (value, from) => {
    if (!Number.isFinite(value)) return;
    state.moved.set(slider.id, value);
    const at = position(slider.axis, value);
    if (from !== "range") range.value = String(Math.round(STEPS * at));
    if (from !== "entry") entry.value = String(value);
    range.setAttribute("aria-valuetext", `${number(value)}${unit}`);
    for (const end of ["x1", "x2"]) chart.tried.setAttribute(end, String(1000 * at));
    chart.tried.setAttribute("visibility", "visible");
    node.classList.add("moved");
    reset.hidden = false;
    askSoon();
  };
  const undo = () => {
    state.moved.delete(slider.id);
    range.value = String(Math.round(STEPS * position(slider.axis, slider.limit)));
    entry.value = String(Number(slider.limit.toPrecision(6)));
    chart.tried.setAttribute("visibility", "hidden");
    node.classList.remove("moved");
    reset.hidden = true;
    askSoon();
  };
  range.oninput = () => move(valueAt(slider, Number(range.value) / STEPS), "range");
  entry.oninput = () => entry.value !== "" && move(Number(entry.value), "entry");
  reset.onclick = undo;
  state.drawn.set(slider.id, { node, reset: undo });
  return node;
}

function askSoon() {
  clearTimeout(state.timer);
  state.timer = setTimeout(ask, WAIT_MS);
}

/** Ask what the moved limits keep. A newer question ends an older one. */
async function ask() {
  $("reset-limits").hidden = !state.moved.size;
  state.controller?.abort();
  state.controller = new AbortController();
  try {
    const answer = await post("/api/whatif", { settings: Object.fromEntries(state.moved) }, state.controller.signal);
    show($("limits-message"), "");
    $("answer").replaceChildren(...drawAnswer(answer));
  } catch (error) {
    if (error.name !== "AbortError") show($("limits-message"), error.message);
  }
}

function changed(value) {
  return el("span", { className: `change${value > 0 ? " up" : value < 0 ? " down" : ""}`, textContent: signed(value) });
}

function tile(label, totals, name) {
  const before = totals.before[name];
  const after = totals.after[name];
  if (after === null) return el("div", {}, el("dt", {}, label), el("dd", {}, "–", el("small", {}, "no dataset yet")));
  const estimated = name === "tokens" && totals.after.tokens_estimated ? "≈ " : "";
  const error = totals.error[`${name}_change`];
  const small = el("small", {}, changed(after - before), error ? ` ± ${whole(error)}` : "");
  const total = totals.error[name] ? el("small", {}, `± ${whole(totals.error[name])} in all`) : null;
  return el("div", { attrs: { "data-tile": name } }, el("dt", {}, label), el("dd", {}, `${estimated}${whole(after)}`, small, total));
}

function drawAnswer(answer) {
  const totals = answer.totals;
  const tiles = el("dl", { className: "tiles" }, tile("Documents kept", totals, "documents"), tile("Characters", totals, "chars"), tile("Tokens", totals, "tokens"));
  const command = state.moved.size
    ? [
        el("p", { className: "note", textContent: "The exact answer, with deduplication and all documents:" }),
        el("div", { className: "command" }, el("code", { id: "whatif-command" }, answer.command), copyButton("Copy", answer.command)),
      ]
    : [el("p", { className: "note", textContent: "Move a limit to see what it would keep." })];
  const links = (title, list) => (list.length ? [el("p", { className: "caption", textContent: title }), el("ul", { className: "examples" }, ...list.map((item) => el("li", {}, el("a", { href: `#${new URLSearchParams(item)}`, textContent: item.doc.slice(0, 12) }))))] : []);
  const rules = answer.by_rule.filter((row) => row.before || row.after);
  const differing = rules.filter((row) => row.before !== row.after);
  const languages = answer.by_language.map((row) => [row.name, row.before.documents, row.after.documents]);
  return [
    tiles,
    ...command,
    ...links("Examples of documents that would be kept", answer.newly_kept),
    ...links("Examples of documents that would be dropped", answer.newly_dropped),
    counts("Kept by language", "Language", languages),
    differing.length ? counts("Dropped, by rules that change", "Rule", differing.map((row) => [row.name, row.before, row.after])) : null,
    el("details", { className: "all-rules" }, el("summary", {}, `All ${plural(rules.length, "rule")} that drop documents`), counts(null, "Rule", rules.map((row) => [row.name, row.before, row.after]))),
  ].filter(Boolean);
}

/** Return a table of counts; more documents that a rule drops are neither good nor bad, so only kept ones have colors. */
function counts(caption, label, rows) {
  const difference = (value) => (label === "Rule" ? el("b", { className: value < 0 ? "fewer" : "more-drops" }, signed(value)) : changed(value));
  const head = [label, "Run", "Tried", "Change"].map((text, index) => el("th", { className: index ? "num" : "", textContent: text, attrs: { scope: "col" } }));
  const lines = rows.map(([name, before, after]) =>
    el("tr", { attrs: { "data-row": name } }, el("th", { attrs: { scope: "row" } }, el("code", {}, ...breakable(name))), el("td", { className: "num" }, whole(before)), el("td", { className: "num" }, whole(after)), el("td", { className: "num" }, before === after ? el("span", { className: "quiet" }, "same") : difference(after - before))),
  );
  return el("div", { className: "sheet" }, el("table", { className: "data" }, caption ? el("caption", {}, caption) : null, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...lines)));
}

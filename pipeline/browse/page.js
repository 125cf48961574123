// The view of documents: search and filters, lists of hits, and the state of the page in its address.

import { $, announce, breakable, copy, el, number, pieces, plural, request, show, verdictText, whole, wireTabs } from "./dom.js";
import { closeDocument, openDocument } from "./document.js";
import { openLimits } from "./limits.js";

const FIELDS = ["contains", "where", "verdict", "rule", "language", "source", "domain"];
const PAGE_ROWS = 50;
// A page that is not full continues the search so many times by itself; then the reader decides.
const MAX_CONTINUED = 25;

const state = { facts: null, columns: [], units: {}, lists: [], random: null };

/** Return the parameters of the form, as the server names them. */
function parameters() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, $(name).value.trim()]));
  return { ...values, has_text: $("has-text").checked ? "1" : "", columns: state.columns.join(",") };
}

/** Return the address of the current view, so that it can be opened again; `changes` replace single values. */
function address(changes = {}) {
  const values = { ...parameters(), text: $("has-text").checked ? "" : "any", beside: $("beside").checked ? "1" : "" };
  delete values.has_text;
  if (values.columns === state.facts.default_columns.join(",")) delete values.columns;
  const entries = { ...values, seed: state.random ?? "", ...changes };
  return `#${new URLSearchParams(Object.entries(entries).filter(([, value]) => value !== "" && value !== null))}`;
}

/** Set the form to the values of the address. */
function readAddress() {
  const values = new URLSearchParams(location.hash.slice(1));
  for (const name of FIELDS) $(name).value = values.get(name) ?? "";
  $("has-text").checked = values.get("text") !== "any";
  $("beside").checked = values.get("beside") === "1";
  state.random = values.get("seed");
  state.columns = values.has("columns") ? values.get("columns").split(",") : [...state.facts.default_columns];
  return values;
}

class List {
  /** One list of hits; `verdict` overrides the form's, for kept beside dropped. */
  constructor(verdict, title) {
    this.verdict = verdict;
    this.rows = [];
    this.sorted = null;
    this.head = el("tr");
    this.body = el("tbody");
    this.progress = el("span", {}, "");
    this.button = el("button", { type: "button", className: "more", hidden: true });
    this.table = el("table", {}, el("thead", {}, this.head), this.body);
    this.scroll = el("div", { className: "scroll", attrs: { tabindex: "0", "aria-label": title ?? "Documents" } }, this.table);
    const foot = el("div", { className: "list-foot", attrs: { "aria-live": "polite" } }, this.progress, this.button);
    this.node = el("section", { className: "list" }, title ? el("h2", {}, title) : null, this.scroll, foot);
    this.next = "0.0";
    this.controller = new AbortController();
    this.totals = { rows: 0, texts: 0 };
    this.drawHead();
  }

  columns() {
    // Two lists and a narrow page have no room for columns, except for those that the reader has chosen.
    const isDefault = state.columns.join() === state.facts.default_columns.join();
    return isDefault && (this.verdict || innerWidth <= 768) ? [] : state.columns;
  }

  drawHead() {
    const cell = (name, label, className, title) => {
      const order = this.sorted?.name === name ? (this.sorted.up ? "ascending" : "descending") : "none";
      const button = el("button", { type: "button", textContent: label, title: `${title}. Sorts this page.`, onclick: () => this.sort(name) });
      return el("th", { className, attrs: { scope: "col", "aria-sort": order } }, button);
    };
    const columns = this.columns().map((name) => cell(name, name, isNumeric(name) ? "num" : "", meaningOf(name)));
    this.head.replaceChildren(cell("title", "Document", "title", "Title and address"), cell("verdict", "Verdict", "", "Rule, value and limit"), ...columns);
  }

  /** Read until `PAGE_ROWS` more documents were found, the run ends, or the reader stops. */
  async load() {
    const wanted = this.rows.length + PAGE_ROWS;
    this.button.hidden = false;
    this.button.textContent = "Stop";
    let stopped = false;
    this.button.onclick = () => (stopped = true);
    try {
      for (let round = 0; round < MAX_CONTINUED && this.next && this.rows.length < wanted && !stopped; round += 1) {
        const query = { ...parameters(), from: this.next, limit: wanted - this.rows.length };
        if (this.verdict) query.verdict = this.verdict;
        const page = await request("/api/documents", query, { signal: this.controller.signal });
        this.add(page);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      this.button.hidden = true;
      show($("search-message"), error.message);
      return;
    }
    this.button.hidden = !this.next;
    this.button.textContent = this.rows.length >= wanted ? "More documents" : "Continue the search";
    this.button.onclick = () => this.load();
  }

  async draw(seed) {
    try {
      const page = await request("/api/random", { ...parameters(), ...(this.verdict ? { verdict: this.verdict } : {}), seed }, { signal: this.controller.signal });
      this.add(page);
      this.button.hidden = true;
      this.progress.textContent = `${plural(this.rows.length, "random document")} of seed ${seed}, drawn from ${plural(page.rows_read, "row")} in ${page.parts_done} of ${plural(page.parts, "part")}`;
    } catch (error) {
      if (error.name !== "AbortError") show($("search-message"), error.message);
    }
  }

  add(page) {
    this.next = page.next;
    this.rows.push(...page.rows);
    this.totals.rows += page.rows_read;
    this.totals.texts += page.texts_read;
    const texts = this.totals.texts ? `, ${plural(this.totals.texts, "text")} searched` : "";
    this.progress.textContent = `${plural(this.rows.length, "document")} · scanned ${page.parts_done} of ${plural(page.parts, "part")}, ${whole(this.totals.rows)} of ${plural(state.facts.rows, "row")}${texts}`;
    const command = $("copy-search");
    command.hidden = !page.command || state.random !== null;
    command.title = page.command ?? "";
    command.onclick = () => copy(page.command);
    this.sorted ? this.drawRows() : this.body.append(...page.rows.map((row) => this.row(row)));
    if (!this.rows.length && !this.next) {
      this.body.replaceChildren(el("tr", {}, el("td", { colSpan: 9, className: "empty", textContent: "No document meets these conditions." })));
    }
  }

  sort(name) {
    const key = { title: (row) => row.title ?? row.url, verdict: (row) => row.verdict.rule }[name] ?? ((row) => row.values[name]);
    this.sorted = { name, up: this.sorted?.name === name ? !this.sorted.up : true };
    const sign = this.sorted.up ? 1 : -1;
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    const empty = (value) => value === null || value === undefined;
    // Documents without a value come last in both directions.
    this.rows.sort((a, b) => empty(key(a)) - empty(key(b)) || (empty(key(a)) ? 0 : sign * compare(key(a), key(b))));
    this.drawHead();
    this.drawRows();
  }

  drawRows() {
    this.body.replaceChildren(...this.rows.map((row) => this.row(row)));
    markOpen();
  }

  row(row) {
    const link = el("a", { href: address({ doc: row.doc, at: row.at }), textContent: row.title || "(no title)" });
    const title = el("td", { className: "title" }, link, el("small", {}, row.url ?? row.doc));
    if (row.snippet?.length) title.append(el("div", { className: "snippet" }, "… ", ...pieces(row.snippet), " …"));
    const verdict = verdictText(row.verdict);
    const judged = row.verdict.kept ? el("td", { className: "verdict", textContent: "kept" }) : el("td", { className: "verdict dropped", title: `${verdict.stage}/${verdict.rule}` }, ...breakable(verdict.rule), el("small", {}, verdict.measured));
    const values = this.columns().map((name) => {
      const value = row.values[name];
      const text = number(value);
      return el("td", { className: `value${isNumeric(name) ? " num" : ""}`, textContent: text, title: `${name}: ${text} ${unitOf(name)}` });
    });
    const node = el("tr", { onclick: (event) => event.target.closest("a") || link.click(), attrs: { "data-doc": row.doc } }, title, judged, ...values);
    return node;
  }
}

function columnOf(name) {
  return state.facts.columns.find((column) => column.name === name);
}
const isNumeric = (name) => /^(int|float|double|uint)/.test(columnOf(name)?.type ?? "");
const meaningOf = (name) => columnOf(name)?.meaning || name;
const unitOf = (name) => columnOf(name)?.unit ?? "";

/** Start a new search, or draw random documents, and show their lists. */
function startSearch() {
  for (const list of state.lists) list.controller.abort();
  show($("search-message"), "");
  state.lists = $("beside").checked ? [new List("kept", "Kept"), new List("dropped", "Dropped")] : [new List("", null)];
  $("verdict").disabled = $("beside").checked;
  $("lists").replaceChildren(...state.lists.map((list) => list.node));
  for (const list of state.lists) state.random === null ? list.load() : list.draw(state.random);
}

function markOpen() {
  const open = new URLSearchParams(location.hash.slice(1)).get("doc");
  for (const row of document.querySelectorAll("#lists tbody tr")) {
    if (row.dataset.doc === open) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

let searched = null;

/** Show what the address names: the view, the search and the document. */
function follow() {
  const values = readAddress();
  const isLimits = values.get("view") === "limits";
  $("view-documents").hidden = isLimits;
  $("view-limits").hidden = !isLimits;
  for (const [name, selected] of [["documents", !isLimits], ["limits", isLimits]]) {
    $(`tab-${name}`).setAttribute("aria-selected", String(selected));
    $(`tab-${name}`).tabIndex = selected ? 0 : -1;
  }
  if (isLimits) {
    openLimits();
    return;
  }
  const wanted = address();
  if (wanted !== searched) {
    searched = wanted;
    drawColumns();
    startSearch();
  }
  const doc = values.get("doc");
  document.body.classList.toggle("reading", Boolean(doc));
  if (doc) openDocument({ doc, at: values.get("at"), contains: $("contains").value.trim(), other: values.get("with"), part: values.get("part") }, address);
  else closeDocument();
  markOpen();
}

/** Change the address and show the new state at once. The event `hashchange` comes later, and would overwrite what was typed in between. */
function go(target) {
  if (target !== location.hash && (target !== "#" || location.hash)) history.pushState(null, "", target);
  follow();
}

function drawColumns() {
  const filter = $("column-filter").value.trim().toLowerCase();
  const shown = state.facts.columns.filter((column) => `${column.name} ${column.meaning}`.toLowerCase().includes(filter));
  $("columns").replaceChildren(
    ...shown.map((column) => {
      const box = el("input", { type: "checkbox", checked: state.columns.includes(column.name) });
      box.onchange = () => {
        state.columns = box.checked ? [...state.columns, column.name] : state.columns.filter((name) => name !== column.name);
        go(address());
      };
      return el("label", {}, box, ` ${column.name}`, el("small", {}, [column.meaning, column.unit].filter(Boolean).join(" · ")));
    }),
  );
}

function moveInList(step) {
  const rows = [...document.querySelectorAll("#lists tbody tr[data-doc]")];
  const at = rows.findIndex((row) => row.getAttribute("aria-current") === "true");
  const next = rows[at < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, at + step))];
  next?.querySelector("a").click();
  next?.scrollIntoView({ block: "nearest" });
}

function wire() {
  $("search").onsubmit = (event) => {
    event.preventDefault();
    state.random = null;
    searched = null;
    go(address());
  };
  $("search").onreset = (event) => {
    event.preventDefault();
    searched = null;
    go("#");
  };
  for (const name of ["verdict", "rule", "language", "has-text", "beside"]) {
    $(name).onchange = () => {
      if (name === "rule" && $("rule").value) $("has-text").checked = false;
      go(address());
    };
  }
  $("random").onclick = () => {
    const last = state.random === null ? -1 : Number(state.random);
    state.random = String(last + 1);
    $("contains").value = "";
    go(address());
  };
  $("column-filter").oninput = drawColumns;
  document.addEventListener("click", (event) => {
    if (!$("columns-menu").contains(event.target)) $("columns-menu").open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      $("columns-menu").open = false;
      if (document.body.classList.contains("reading") && innerWidth <= 768) go(address());
    }
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if ($("view-documents").hidden) return;
    if (event.key === "/") {
      event.preventDefault();
      $("contains").focus();
    } else if (event.key === "j" || event.key === "k") moveInList(event.key === "j" ? 1 : -1);
  });
  wireTabs(document.querySelector(".views"), (tab) => go(tab.id === "tab-limits" ? address({ view: "limits" }) : address()));
  addEventListener("hashchange", follow);
}

async function start() {
  // The token stays in the cookie; without it the address can be shared and is not in the history.
  if (location.search) history.replaceState(null, "", `/${location.hash}`);
  try {
    state.facts = await request("/api/run");
  } catch (error) {
    show($("search-message"), error.message);
    return;
  }
  const facts = state.facts;
  document.title = `${facts.name} · Penstock browse`;
  $("run-name").textContent = facts.name;
  $("run-name").title = facts.address;
  $("run-facts").textContent = `${plural(facts.kept, "document")} kept of ${plural(facts.rows, "record")} in ${plural(facts.parts, "part")}`;
  $("rule").append(...facts.rules.map((rule) => el("option", { value: rule.name, textContent: `${rule.name} (${whole(rule.count)})`, title: rule.meaning })));
  $("language").append(...facts.languages.map(([name, count]) => el("option", { value: name, textContent: `${name} (${whole(count)})` })));
  $("sources").append(...facts.sources.map((name) => el("option", { value: name })));
  wire();
  follow();
  if (!facts.tables.some((table) => table.name === "text")) announce("This run stores no raw text.");
}

start();

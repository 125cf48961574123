// One document: its verdict, text with cuts and hits, clean text, signals, provenance, and its copies side by side.

import { $, breakable, copyButton, el, number, pieces, plural, request, signed, verdictText, whole, wireTabs } from "./dom.js";

let current = null;
let shownPart = "text";
let controller = new AbortController();

export function closeDocument() {
  if (current === null) return;
  current = null;
  controller.abort();
  $("document").replaceChildren(el("p", { className: "empty", textContent: "Choose a document from the list." }));
}

/** Show the document that the address names. `address(changes)` returns the address of another document or part. */
export async function openDocument(wanted, address) {
  const key = JSON.stringify(wanted);
  if (key === current) return;
  current = key;
  controller.abort();
  controller = new AbortController();
  const pane = $("document");
  pane.setAttribute("aria-busy", "true");
  try {
    const parameters = { doc: wanted.doc, at: wanted.at, contains: wanted.contains };
    const data = await request("/api/document", parameters, { signal: controller.signal });
    if (wanted.part) shownPart = wanted.part;
    pane.replaceChildren(...draw(data, wanted, address));
    pane.scrollTop = 0;
    if (innerWidth <= 768) scrollTo(0, 0);
  } catch (error) {
    if (error.name !== "AbortError") pane.replaceChildren(back(address), el("p", { className: "message bad", textContent: error.message }));
  }
  pane.removeAttribute("aria-busy");
}

const back = (address) => el("a", { className: "back", href: address(), textContent: "← Back to the list" });

function draw(data, wanted, address) {
  const verdict = data.verdict;
  const details = [verdict.meaning && `Meaning of the rule: ${verdict.meaning}.`, verdict.setting && `Setting: ${verdict.setting}.`];
  const judgement = el(
    "div",
    { className: `judgement${verdict.kept ? "" : " dropped"}`, id: "judgement" },
    el("b", {}, verdict.sentence),
    ...details.filter(Boolean).map((text) => el("span", {}, text)),
  );
  const link = `${location.origin}/${address({ doc: data.doc, at: data.at })}`;
  const commands = el("p", { className: "commands" }, copyButton("Copy show command", data.commands[0]), copyButton("Copy with clean text", data.commands[1]), copyButton("Copy link", link));
  const size = data.cluster?.cluster_size ?? 0;
  const parts = {
    text: ["Text", () => rawText(data, wanted)],
    clean: ["Clean text", () => cleanText(data)],
    signals: [`Signals (${data.signals.length})`, () => signals(data)],
    provenance: ["Provenance", () => provenance(data)],
    copies: [size > 1 ? `Copies (${whole(size)})` : "Copies", () => copies(data, wanted, address)],
  };
  const list = el("div", { className: "parts", attrs: { role: "tablist", "aria-label": "Parts of the document" } });
  const part = el("div", { className: "part", id: "part", attrs: { role: "tabpanel" } });
  for (const [name, [label]] of Object.entries(parts)) {
    list.append(el("button", { type: "button", textContent: label, attrs: { role: "tab", "data-part": name, "aria-controls": "part", "aria-selected": "false" } }));
  }
  const choose = wireTabs(list, (tab) => {
    shownPart = tab.dataset.part;
    part.setAttribute("aria-label", tab.textContent);
    part.replaceChildren(...parts[shownPart][1]());
  });
  choose(list.querySelector(`[data-part="${shownPart}"]`) ?? list.firstChild);
  return [
    back(address),
    el("h2", {}, data.title || "(no title)"),
    el("p", { className: "url" }, data.url ?? "no URL"),
    el("p", { className: "id" }, data.doc),
    judgement,
    commands,
    list,
    part,
  ];
}

function body(text, missing) {
  if (!text) return [el("p", { className: "empty", textContent: missing })];
  const shown = el("div", { className: "text" }, ...pieces(text.pieces));
  const rest = text.chars - text.shown_chars;
  return rest ? [shown, el("p", { className: "note", textContent: `${plural(rest, "further character")} not shown.` })] : [shown];
}

function rawText(data, wanted) {
  if (!data.text) return body(null, "The run stores no text for this record.");
  const hits = wanted.contains ? `, ${plural(data.num_hits, "hit")} of “${wanted.contains}”` : "";
  const note = el("p", { className: "note" }, `Raw text: it may hold personal data. ${plural(data.text.chars, "character")}, ${whole(data.cut_chars)} cut${hits}. `);
  if (data.cut_chars || hits) {
    note.append(el("span", { className: "keys text" }, data.cut_chars ? el("span", { className: "cut", textContent: "cut" }) : null, hits ? el("mark", { textContent: "hit" }) : null));
  }
  return [note, ...body(data.text, "")];
}

function cleanText(data) {
  if (!data.clean) {
    const reason = data.verdict.kept ? "The run has no clean text of this document yet." : "Only kept documents have clean text.";
    return body(null, reason);
  }
  const note = el("p", { className: "note" }, "Text after all cuts, with personal data replaced. Placeholders look like ", el("span", { className: "pii", textContent: "<EMAIL>" }), ".");
  return [note, ...body(data.clean, "")];
}

function signals(data) {
  const rows = [...data.signals].sort((a, b) => rank(b) - rank(a));
  const checked = rows.filter((row) => row.checks.length);
  const others = rows.filter((row) => !row.checks.length);
  const out = [];
  if (checked.length) out.push(sheet("Signals that a rule compares", ["Signal", "Value", "Limit", "Rule"], checked.flatMap(checkedRows)));
  out.push(sheet("Other signals", ["Signal", "Value", "Table"], others.map((row) => [nameCell(row), valueCell(row), row.table])));
  return out;
}

const rank = (row) => (row.checks.some((check) => check.broken) ? 2 : row.checks.length ? 1 : 0);

function checkedRows(row) {
  return row.checks.map((check) => {
    const sign = check.side === "min" ? "≥" : "≤";
    const limit = el("span", { className: check.broken ? "loud" : "", textContent: `${sign} ${number(check.limit)}`, title: check.setting });
    return [nameCell(row), valueCell(row, check.broken), limit, el("span", { className: check.broken ? "loud" : "quiet", title: check.setting }, ...breakable(check.rule), check.broken ? ": broken" : "")];
  });
}

function nameCell(row) {
  return el("span", { title: row.meaning }, el("code", {}, ...breakable(row.name)), el("small", {}, row.meaning));
}

function valueCell(row, broken) {
  const unit = row.unit && !["ratio", "0..1"].includes(row.unit) ? el("small", {}, row.unit) : null;
  return el("span", { className: broken ? "loud" : "" }, number(row.value), unit);
}

function sheet(caption, heads, rows) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { textContent: text, attrs: { scope: "col" } })));
  const lines = rows.map((cells) => el("tr", {}, ...cells.map((cell, index) => el(index ? "td" : "th", index ? {} : { attrs: { scope: "row" } }, cell))));
  return el("div", { className: "sheet" }, el("table", { className: "data" }, caption ? el("caption", {}, caption) : null, el("thead", {}, head), el("tbody", {}, ...lines)));
}

function provenance(data) {
  const note = el("p", { className: "note", textContent: "Where the record is: the input file, and its offset and length in bytes." });
  return [note, sheet(null, ["Field", "Value"], data.provenance.map((row) => [nameCell(row), valueCell({ ...row, value: row.value ?? "–" })]))];
}

function copies(data, wanted, address) {
  const cluster = data.cluster;
  if (!cluster) return body(null, "This record was dropped before deduplication, so it is in no cluster.");
  if (cluster.cluster_size === null && cluster.similarity === null && !cluster.joined_with) return body(null, "No copy of this document was detected.");
  if (cluster.cluster_size === 1) return body(null, "No copy of this document was detected.");
  const note = el("p", { className: "note" }, `Cluster ${cluster.cluster}. The survivor is ${cluster.survivor ?? "none, since every copy was dropped before"}. Choose a copy to see the differences.`);
  const list = el("tbody");
  const heads = ["Document", "Verdict", "Similarity", ""].map((text) => el("th", { textContent: text, attrs: { scope: "col" } }));
  const table = el("div", { className: "sheet" }, el("table", { className: "data" }, el("thead", {}, el("tr", {}, ...heads)), list));
  const progress = el("p", { className: "note", textContent: "Searching for the documents of the cluster…" });
  const more = el("button", { type: "button", className: "more", textContent: "Continue the search", hidden: true });
  const comparison = el("div", { id: "comparison", attrs: { "aria-live": "polite" } });
  const members = [];
  let from = "0.0";

  const compare = async (other) => {
    comparison.replaceChildren(el("p", { className: "note", textContent: "Comparing…" }));
    try {
      const value = await request("/api/compare", { a: data.doc, at_a: data.at, b: other.doc, at_b: other.at });
      comparison.replaceChildren(...differences(value, data, other));
    } catch (error) {
      comparison.replaceChildren(el("p", { className: "message bad", textContent: error.message }));
    }
  };
  const load = async () => {
    more.hidden = true;
    try {
      const page = await request("/api/cluster", { cluster: cluster.cluster, from });
      for (const member of page.members) {
        members.push(member);
        list.append(memberRow(member, data, cluster, address, compare));
      }
      from = page.next;
      more.hidden = !from;
      const size = cluster.cluster_size === null ? "" : ` of ${whole(cluster.cluster_size)}`;
      const earlier = !from && cluster.cluster_size > members.length ? " The others are in earlier snapshots." : "";
      progress.textContent = `${plural(members.length, "document")}${size}; scanned ${page.parts_done} of ${plural(page.parts ?? page.parts_done, "part")}.${earlier}`;
      const other = members.find((member) => member.doc === cluster.survivor && member.doc !== data.doc) ?? members.find((member) => member.doc !== data.doc);
      if (other && !comparison.firstChild) compare(other);
    } catch (error) {
      progress.textContent = error.message;
    }
  };
  more.onclick = load;
  load();
  return [note, table, progress, more, comparison];
}

function memberRow(member, data, cluster, address, compare) {
  const isOpen = member.doc === data.doc;
  const title = el("span", {}, isOpen ? el("b", {}, member.title || "(no title)") : el("a", { href: address({ doc: member.doc, at: member.at }), textContent: member.title || "(no title)" }), el("small", {}, member.url ?? member.doc));
  const verdict = verdictText(member.verdict);
  const judged = el("span", { className: `verdict${member.verdict.kept ? "" : " dropped"}`, textContent: member.verdict.kept ? "kept" : verdict.rule });
  const mark = member.doc === cluster.survivor ? el("small", {}, "survivor") : null;
  const button = isOpen ? el("span", { className: "quiet", textContent: "this one" }) : el("button", { type: "button", className: "plain", textContent: "Differences", onclick: () => compare(member) });
  const cells = [title, el("span", {}, judged, mark), number(member.similarity), button];
  return el("tr", { attrs: isOpen ? { "aria-current": "true" } : {} }, ...cells.map((cell, index) => el(index ? "td" : "th", index ? {} : { attrs: { scope: "row" } }, cell)));
}

function differences(value, data, other) {
  const share = value.equal_share === 1 ? "All words are equal" : `${number(100 * value.equal_share)} % of the words are equal`;
  const bound = value.is_whole ? "" : ` The first ${whole(value.max_words)} words of each text were compared.`;
  const note = el("p", { className: "note" }, `${share}.${bound} `, el("span", { className: "keys" }, el("span", { className: "removed", textContent: "only in this document" }), el("span", { className: "added", textContent: "only in the other" })));
  const change = (other.num_chars ?? 0) - (data.text?.chars ?? 0);
  const side = (title, list) => el("div", {}, el("h3", {}, title), el("div", { className: "text" }, ...pieces(list)));
  return [
    el("h3", { className: "caption", textContent: "Texts after cuts, side by side" }),
    note,
    el("div", { className: "pair" }, side(data.url ?? data.doc, value.a), side(`${other.url ?? other.doc} (${change ? `${signed(change)} characters` : "same length"})`, value.b)),
  ];
}

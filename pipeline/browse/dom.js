// Elements, requests and formats that all views share. Text from the run is only ever inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** Return an element; `options` are properties, `attrs` attributes, and `children` strings or elements. */
export function el(name, options = {}, ...children) {
  const { attrs = {}, ...properties } = options;
  const node = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attrs = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

let token = "";

/** Send a request and return its JSON value. Throws an Error with the server's message. */
export async function request(path, parameters = {}, options = {}) {
  const filled = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(filled).toString();
  let response;
  try {
    response = await fetch(query ? `${path}?${query}` : path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Start `penstock browse` again.");
  }
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  if (path === "/api/run") token = value.token;
  return value;
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json", "X-Penstock-Token": token };
  return request(path, {}, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Return a text that the server has divided into pieces with marks, as elements. */
export function pieces(list) {
  return list.map((piece) => {
    const kinds = Object.keys(piece.marks);
    if (!kinds.length) return document.createTextNode(piece.text);
    const span = el(kinds.includes("hit") ? "mark" : "span", { className: kinds.join(" "), textContent: piece.text });
    const reasons = Object.entries(piece.marks).map(([kind, reason]) => (kind === "cut" ? `cut: ${reason}` : reason)).filter(Boolean);
    if (reasons.length) span.title = reasons.join("; ");
    if (kinds.includes("cut")) {
      span.classList.toggle("blank", !piece.text.trim());
      span.setAttribute("aria-label", `${span.title}: ${piece.text}`);
    }
    return span;
  });
}

/** Return a name as text that may be broken after its underscores and slashes. */
export function breakable(name) {
  return name.split(/(?<=[_/])/).flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part]));
}

export const whole = (value) => Math.round(value).toLocaleString("en-US");

/** Format a number with four significant digits, or with separators if it is whole. */
export function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) >= 10000 ? whole(value) : String(Number(value.toPrecision(4)));
}

export function signed(value) {
  return value === 0 ? "no change" : `${value > 0 ? "+" : "−"}${whole(Math.abs(value))}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

let timer = 0;

/** Show a short message at the bottom of the page. */
export function announce(text) {
  const status = $("status");
  status.textContent = text;
  status.classList.add("shown");
  clearTimeout(timer);
  timer = setTimeout(() => status.classList.remove("shown"), 2200);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
  } catch {
    // Without permission for the clipboard, the text is selected in a field, from which it can be copied by hand.
    window.prompt("Copy this text:", text);
  }
}

export function copyButton(label, text) {
  return el("button", { type: "button", className: "plain", textContent: label, title: text, onclick: () => copy(text) });
}

export function verdictText(verdict) {
  if (verdict.kept) return "kept";
  const measured = verdict.value === null ? "" : ` ${number(verdict.value)}${verdict.limit === null ? "" : `, limit ${number(verdict.limit)}`}`;
  return { rule: verdict.rule, stage: verdict.stage, measured: measured.trim() };
}

export function show(node, message) {
  node.textContent = message || "";
  node.hidden = !message;
}

/** Make the tabs of a tab list selectable by mouse and arrow keys; `select(tab)` is called for the new one. */
export function wireTabs(list, select) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const choose = (tab) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
    }
    select(tab);
  };
  tabs.forEach((tab, index) => {
    tab.onclick = () => choose(tab);
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = tabs[(index + step + tabs.length) % tabs.length];
      next.focus();
      choose(next);
    };
  });
  return choose;
}

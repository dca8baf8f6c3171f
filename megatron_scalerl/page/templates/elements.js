"use strict";
// Elements from text. Nothing here or elsewhere gives data to innerHTML: what a completion holds stays text.
const DATA = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function byId(id) { return document.getElementById(id); }

function fill(id, ...children) { byId(id).replaceChildren(...children.flat().filter((child) => child !== null)); }

function short(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded); // 0.000004 is too wide beside an axis
}

function cssColor(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// Requests go to the page's own server only, below the page's address and with its token.
async function ask(path, query = {}) {
  const all = new URLSearchParams(query);
  all.set("token", new URLSearchParams(location.search).get("token") || "");
  const answer = await fetch(`api/${path}?${all}`, { cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

"use strict";
// The list of runs; and, on a server, what is new.
const DEFAULT_CHOSEN = 6;
const ORDERS = {
  "newest first": (p, q) => (q.wrote ?? 0) - (p.wrote ?? 0),
  name: (p, q) => (p.name < q.name ? -1 : 1),
  "highest validation": (p, q) => (q.validation.at(-1)?.[2] ?? -1) - (p.validation.at(-1)?.[2] ?? -1),
  "highest ceiling": (p, q) => (q.fit?.ceiling[0] ?? -1) - (p.fit?.ceiling[0] ?? -1),
  "most hours": (p, q) => (q.hours ?? -1) - (p.hours ?? -1),
};
const LIST = { order: "newest first", query: "", rows: new Map() };

function rowOf(id) {
  if (!LIST.rows.has(id)) {
    const box = el("input", { type: "checkbox", onchange: () => onChoose(id, box.checked) });
    const cells = ["name", "state", "step", "validation", "ceiling", "hours"].map((name) => el(name === "name" ? "th" : "td", { scope: name === "name" ? "row" : null, class: ["step", "validation", "hours"].includes(name) ? "number" : null }));
    const mark = el("span", { class: "swatch" });
    LIST.rows.set(id, { box, cells, mark, said: "", made: el("tr", {}, el("td", { class: "pick" }, box, mark), cells) });
  }
  return LIST.rows.get(id);
}

function day(seconds) { return seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : ""; }

function showRow(id, run) {
  const row = rowOf(id), chosen = COMPARED.chosen.has(id), said = JSON.stringify([run, COMPARED.chosen.get(id)]);
  if (row.said === said) return row.made;
  row.said = said;
  row.box.checked = chosen;
  row.box.disabled = !run.validation.length;
  row.box.setAttribute("aria-label", `draw ${run.name}`);
  const mark = swatch(id);
  row.mark.replaceWith(mark);
  row.mark = mark;
  const last = run.validation.at(-1), small = (text, name) => (text ? el("small", { class: name }, text) : null);
  const title = run.opens && DATA.live ? el("a", { href: `run/${id}/${location.search}` }, run.name) : run.name;
  const ceiling = run.fit ? `${run.fit.ceiling[0].toFixed(3)} [${run.fit.ceiling[1].toFixed(3)}, ${run.fit.ceiling[2].toFixed(3)}]` : run.pending ? "…" : "–";
  const [name, state, step, validation, top, hours] = row.cells;
  const put = (cell, ...children) => cell.replaceChildren(...children.filter((child) => child !== null));
  put(name, title, small(run.recipe && !run.name.endsWith(run.recipe) ? run.recipe : ""), small(run.problem, "fault"));
  put(state, el("span", { class: `state ${run.state.split(" ")[0]}` }, run.state), small([run.reason, run.wrote && run.state === "stopped" ? `last wrote ${day(run.wrote)}` : ""].filter(Boolean).join("; ")));
  put(step, short(run.step), small(run.steps ? `of ${run.steps}` : ""));
  put(validation, last ? last[2].toFixed(3) : "–", small(last ? `step ${last[0]}` : ""));
  put(top, ceiling, small(run.state === "finished" ? "" : run.fit?.forecast));
  put(hours, short(run.hours, 3), small(run.hours === null ? "" : run.unit));
  return row.made;
}

function shownIds() {
  const { data } = COMPARED, query = LIST.query.toLowerCase();
  return data.order.filter((id) => !query || `${data.runs[id].name} ${data.runs[id].recipe}`.toLowerCase().includes(query))
    .sort((p, q) => ORDERS[LIST.order](data.runs[p], data.runs[q]) || p - q);
}

function showList() {
  const { data } = COMPARED, body = byId("rows"), wanted = shownIds().map((id) => showRow(id, data.runs[id]));
  // a row that is moved would lose the focus
  if (wanted.length !== body.children.length || wanted.some((row, i) => row !== body.children[i])) body.replaceChildren(...wanted);
  const running = data.order.filter((id) => data.runs[id].state === "running").length;
  byId("where").textContent = `${data.order.length} runs, ${running} running${data.waiting ? `; ${data.waiting} forecasts are still to be made` : ""}${data.left_out ? `; ${data.left_out}` : ""}`;
  byId("others-part").hidden = !data.others.length;
  byId("others-count").textContent = `${data.others.length} other folders`;
  fill("others", el("tbody", {}, data.others.map(([name, text]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, text)))));
  byId("found").textContent = LIST.query ? `${wanted.length} of ${data.order.length} runs` : "";
}

function showChosen(text = "") {
  byId("chosen").textContent = text || `${COMPARED.chosen.size} runs are chosen.`;
  showList();
  drawCurves();
  recipeTable();
}

function onChoose(id, wanted) { showChosen(choose(id, wanted) ? "" : `At most ${MOST_CHOSEN} runs can be told apart in one plot.`); rowOf(id).box.checked = COMPARED.chosen.has(id); }

function chooseMany(ids) {
  COMPARED.chosen.clear();
  const left = ids.filter((id) => COMPARED.data.runs[id].validation.length).filter((id) => !choose(id, true)).length;
  showChosen(left ? `${MOST_CHOSEN} runs are chosen; ${left} more could not be told apart in one plot.` : "");
}

function showControls() {
  const options = Object.keys(ORDERS).map((name) => el("option", { value: name }, name));
  fill("controls",
    el("label", { for: "order" }, "order", el("select", { id: "order", onchange: (event) => { LIST.order = event.target.value; showList(); } }, options)),
    el("label", { for: "filter" }, "names that contain", el("input", { id: "filter", type: "search", autocomplete: "off", oninput: (event) => { LIST.query = event.target.value; showList(); } })),
    el("button", { type: "button", id: "all", onclick: () => chooseMany(shownIds()) }, "choose these"),
    el("button", { type: "button", id: "none", onclick: () => chooseMany([]) }, "choose none"),
    el("span", { id: "found", role: "status" }));
}

async function refresh() {
  const { data } = COMPARED, now = await ask("runs", { since: data.version });
  const changed = Object.keys(now.runs).some((id) => COMPARED.chosen.has(Number(id)));
  const recipes = now.recipes !== null || now.order.join() !== data.order.join();
  now.runs = { ...data.runs, ...now.runs };
  now.recipes ??= data.recipes;
  COMPARED.data = now;
  for (const id of [...COMPARED.chosen.keys()]) if (!now.order.includes(id)) COMPARED.chosen.delete(id);
  showList();
  if (changed || recipes) drawCurves();
  if (recipes) recipeTable();
}

function follow() {
  const events = new EventSource(`api/events${location.search}`);
  let running = Promise.resolve(), waiting = false;
  events.addEventListener("change", () => {
    if (waiting) return;
    waiting = true;
    running = running.then(() => { waiting = false; return refresh(); }).catch((error) => { byId("status").textContent = error.message; });
  });
  events.addEventListener("failed", (event) => { byId("status").textContent = JSON.parse(event.data); });
  events.onopen = () => { byId("status").textContent = "live: new records appear as the runs write them"; };
  events.onerror = () => { byId("status").textContent = "the connection to megatron-scalerl watch is closed"; };
}

byId("name").textContent = COMPARED.data.folder;
fill("head", el("tr", {}, ["drawn", "run", "state", "step", "last validation", "ceiling A and 90 % interval; forecast of the end", "held"].map((text, i) => el("th", { scope: "col", class: [3, 4, 6].includes(i) ? "number" : null }, text))));
byId("controls").addEventListener("submit", (event) => event.preventDefault());
showControls();
const first = DATA.order.filter((id) => DATA.runs[id].validation.length > 1).sort((p, q) => (DATA.runs[q].state === "running") - (DATA.runs[p].state === "running") || ORDERS["newest first"](DATA.runs[p], DATA.runs[q]));
chooseMany(first.slice(0, DEFAULT_CHOSEN));
for (const input of document.querySelectorAll("#axis input")) input.addEventListener("change", () => { COMPARED.axis = input.value; drawCurves(); });
if (DATA.live) follow();

"use strict";
// Header, ledger, events; and, on a server, what is new.
function showHeader() {
  const { header } = RUN.data;
  byId("name").textContent = header.name;
  byId("where").textContent = `${header.folder} · step ${header.step} of ${header.steps}`;
  const verdict = byId("verdict"), over = header.ended !== null, { step, pass_rate } = RUN.data.validation;
  verdict.className = over ? "verdict finished" : `verdict ${header.verdict.split(" ")[0]}`;
  verdict.replaceChildren(...(over
    ? [el("b", {}, "finished"), [header.ended && `: ${header.ended}`, step.length ? ` — reached a pass rate of ${pass_rate.at(-1).toFixed(3)} at step ${step.at(-1)}` : "",
      header.forecast && `; forecast after step ${header.forecast_step}: ${header.forecast.replace(/^at step \d+: |; .*$/g, "")}`].join("")]
    : header.forecast
    ? [el("b", {}, header.verdict), ` — forecast after step ${header.forecast_step} for the end of the run, ${header.forecast.replace(`; ${header.verdict}`, "")}`]
    : ["No forecast yet: it needs a validation at step 0 and four after it."]));
  fill("lines", header.lines.map((line) => el("li", {}, line)));
  byId("axis-unit").textContent = header.unit;
  if (RUN.live) byId("status").textContent = over ? "the run is over; if it is continued, new records appear" : "live: new records appear as the run writes them";
  showDamage();
}

// What cannot be read in the records, and what else went wrong, which the stream of events says.
function showDamage() {
  const { damage } = RUN.data.header, other = RUN.failure && RUN.failure !== damage.join("; ") ? [RUN.failure] : [];
  fill("damage", [...damage, ...other].map((line) => el("li", {}, line)));
}

// A table of text: the first column names the row, the others are at the right edge or, in `words`, at the left one.
function tableInto(id, { columns, rows }, words = new Set()) {
  const number = (i) => ({ class: i && !words.has(i) ? "number" : null });
  fill(id, el("thead", {}, el("tr", {}, columns.map((text, i) => el("th", { scope: "col", ...number(i) }, text)))),
    el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell, i) => el("td", number(i + 1), cell))))));
}

function showEvaluations() {
  const { evaluations } = RUN.data;
  byId("evaluation-results").hidden = !evaluations;
  if (!evaluations) return;
  byId("evaluations-note").textContent = evaluations.notes.join(" ");
  tableInto("evaluations", evaluations, new Set([1, 6]));
}

function showLedger() {
  const { ledger, header } = RUN.data, total = ledger.reduce((sum, each) => sum + each.hours, 0) || 1;
  const bar = (share) => { const made = el("span", { class: "bar" }); made.style.width = `calc(${share.toFixed(4)} * min(16rem, 30vw))`; return made; };
  fill("ledger", el("thead", {}, el("tr", {}, ["role", header.unit, "share", ""].map((text, i) => el("th", { scope: "col", class: i === 1 || i === 2 ? "number" : null }, text)))),
    el("tbody", {}, ledger.map((each) => el("tr", {}, el("th", { scope: "row" }, each.role), el("td", { class: "number" }, short(each.hours)), el("td", { class: "number" }, `${Math.round((100 * each.hours) / total)} %`), el("td", {}, bar(each.hours / total))))));
}

function showEvents() {
  const row = (each) => el("tr", {}, el("td", {}, each.time === null ? "" : new Date(each.time * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC"), el("td", { class: each.kind === "fault" ? "fault" : null }, each.kind), el("td", {}, each.text));
  fill("events", el("table", {}, el("tbody", {}, RUN.data.events.toReversed().map(row))));
}

function showAll() {
  showHeader();
  showLedger();
  showEvaluations();
  showEvents();
}

async function refresh() {
  const known = RUN.data.steps.step.length;
  const now = await ask("data", { since: known, generation: RUN.data.generation });
  if (now.since) for (const [name, values] of Object.entries(now.steps)) now.steps[name] = RUN.data.steps[name].concat(values);
  const first = !RUN.data.trained_steps.length && now.trained_steps.length;
  RUN.data = now;
  showAll();
  redrawFigures();
  if (first) openStep(now.trained_steps.at(-1));
  else if (byId("step")) setOptions(byId("step"), stepOptions(now.trained_steps), state.step);
}

function follow() {
  const events = new EventSource(`api/events${location.search}`);
  let running = Promise.resolve(), waiting = false;
  events.addEventListener("change", () => {
    if (waiting) return;
    waiting = true;
    running = running.then(() => { waiting = false; return refresh(); }).catch((error) => { byId("status").textContent = error.message; });
  });
  events.addEventListener("failed", (event) => { RUN.failure = JSON.parse(event.data); showDamage(); });
  events.onopen = () => { RUN.live = true; showHeader(); };
  events.onerror = () => { RUN.live = false; byId("status").textContent = "the connection to megatron-scalerl watch is closed"; };
}

showAll();
drawFigures();
for (const input of document.querySelectorAll("#axis input")) input.addEventListener("change", () => { RUN.axis = input.value; redrawFigures(); });
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("reader-note").textContent = DATA.live
  ? "Read from the run's store when they are opened. The store has the engine's log-probabilities; mismatch and entropy are recorded per step, in the charts above."
  : `${DATA.groups.length} groups are in this file${DATA.missing_groups ? `, ${DATA.missing_groups} were left out: no longer stored, unreadable, or no room` : ""}; megatron-scalerl watch reads all. The store has the engine's log-probabilities; mismatch and entropy are recorded per step, in the charts above.`;
if (SOURCE.steps().length) openStep(SOURCE.steps().at(-1));
else byId("group").append(el("p", { class: "note" }, "no group was trained yet"));
if (DATA.home) fill("home", el("a", { href: DATA.home + location.search }, "← all runs"));
if (DATA.live) follow();

"use strict";
// The chosen runs: a color and a dash for each, their curves in one chart, and the keys in which their recipes differ.
const MARKS = ["a", "b", "c", "d", "e", "g"];
const DASHES = [undefined, [8, 4]];
const MOST_CHOSEN = MARKS.length * DASHES.length;
const COMPARED = { data: DATA, axis: "compute", chosen: new Map(), chart: null };

function colorOf(id) { return MARKS[COMPARED.chosen.get(id) % MARKS.length]; }
function dashOf(id) { return DASHES[Math.floor(COMPARED.chosen.get(id) / MARKS.length)]; }

function swatch(id) {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  if (COMPARED.chosen.has(id)) made.style.borderTop = `4px ${dashOf(id) ? "dashed" : "solid"} var(--${colorOf(id)})`;
  return made;
}

// False if there is no mark left.
function choose(id, wanted) {
  const { chosen } = COMPARED;
  if (!wanted) { chosen.delete(id); return true; }
  if (chosen.has(id)) return true;
  const taken = new Set(chosen.values());
  const slot = [...Array(MOST_CHOSEN).keys()].find((each) => !taken.has(each));
  if (slot === undefined) return false;
  chosen.set(id, slot);
  return true;
}

function chosenRuns() { return COMPARED.data.order.filter((id) => COMPARED.chosen.has(id)).map((id) => [id, COMPARED.data.runs[id]]); }

function curves() {
  const all = chosenRuns().filter(([, run]) => run.validation.length), steps = COMPARED.axis === "step";
  const unit = all.length ? all[0][1].unit : "device-hours", shown = steps ? all : all.filter(([, run]) => run.unit === unit);
  const tables = [], series = [], bands = [], scaleOf = (fit) => (steps && fit ? 1 / fit.hours_per_step : 1);
  const limit = Math.max(0, ...shown.flatMap(([, { fit, validation }]) => [validation.at(-1)[steps ? 0 : 1], fit ? fit.end * scaleOf(fit) : 0]));
  for (const [id, run] of shown) {
    const { fit, validation } = run, scale = scaleOf(fit);
    const at = validation.map(([step, compute]) => (steps ? step : compute));
    if (fit) {
      const path = fit.path.filter((point, i) => !i || fit.path[i - 1][0] * scale < limit * 0.999);  // one beyond the edge
      const columns = [0, 1, 2, 3].map((k) => path.map((point) => point[k] * (k ? 1 : scale)));
      tables.push(columns);
      const said = (v, i) => forecastAt(columns, series.indexOf(line) + 1, i);
      const line = { label: `${run.name}, forecast`, color: colorOf(id), dash: [2, 3], width: 1.4, value: said };
      const edge = { label: "", color: colorOf(id), faded: true, width: 0.6 };
      series.push(line, edge, { ...edge });
      bands.push({ series: [series.length, series.length - 1], color: colorOf(id), alpha: shown.length > 4 ? "22" : "33" });
    }
    tables.push([at, validation.map((row) => row[2])]);
    series.push({ label: run.name, color: colorOf(id), dash: dashOf(id), points: at.length < 150, width: 1.6 });
  }
  const data = tables.length ? uPlot.join(tables.map(sorted)) : [[]];
  const other = all.length - shown.length;
  const note = !all.length ? "Choose runs in the list." : `Points: measured. Dotted: the forecast from all validations of a run, with the 90 % interval of a measurement.${other ? ` ${other} of other units than ${unit} left out.` : ""}`;
  const spec = { title: "Validation pass rate of the chosen runs", note, height: 360, wide: true, ySize: 50, xLabel: steps ? "step" : unit, series, bands,
    xRange: (u, lo, hi) => (lo === null ? [0, 1] : [Math.max(0, lo), Math.min(hi, limit || hi)]) };
  byId("axis-unit").textContent = unit;
  return { spec, data };
}

// The forecast with its interval at a row of the chart: column `at` and the two behind it.
function forecastAt(columns, at, i) {
  const [value, lo, hi] = [0, 1, 2].map((k) => COMPARED.chart && COMPARED.chart.data[at + k][i]);
  return value === null || value === undefined ? "–" : `${short(value, 3)} [${short(lo, 3)}, ${short(hi, 3)}]`;
}

function drawCurves() {
  const { spec, data } = curves();
  if (!COMPARED.chart) { COMPARED.chart = addChart(byId("curves"), spec, data); return; }
  setData(COMPARED.chart, data, spec);
}

function recipeTable() {
  const { recipes } = COMPARED.data, runs = chosenRuns().filter(([id]) => recipes.values && recipes.values[id]);
  if (runs.length < 2) { fill("recipes", el("p", { class: "note" }, "Choose two runs or more.")); byId("recipes-note").textContent = ""; return; }
  const differing = recipes.keys.map(([key, apart], k) => [key, apart, runs.map(([id]) => recipes.values[id][k])]).filter(([, , values]) => values.some((value) => value !== values[0]));
  const row = ([key, , values]) => el("tr", {}, el("th", { scope: "row" }, key), values.map((value) => el("td", { class: value === values[0] ? null : "differs" }, value ?? "–")));
  const head = () => el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), runs.map(([id, run]) => el("th", { scope: "col" }, swatch(id), run.name))));
  const table = (rows, name) => el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": name }, el("table", { class: "recipes" }, head(), el("tbody", {}, rows.map(row))));
  const own = differing.filter(([, apart]) => !apart), rest = differing.filter(([, apart]) => apart);
  const open = byId("recipes").querySelector("details")?.open;
  byId("recipes-note").textContent = "Bold: another value than in the first column. Whether a difference in the curves is more than that between seeds: megatron-scalerl fit RUN RUN --compare.";
  fill("recipes", own.length ? table(own, "keys of the recipe") : el("p", { class: "note" }, "The same recipe: these runs differ at most in seed, names, files, length, validation and limits of time."),
    rest.length ? el("details", { open: Boolean(open) }, el("summary", {}, `${rest.length} keys that do not make another recipe: seed, names, files, length, validation, limits`), table(rest, "other keys")) : null);
}

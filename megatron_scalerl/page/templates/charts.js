"use strict";
// One chart: uPlot's canvas, a description for readers of screens, arrow keys, and the values as a table.
const CHARTS = [];

// Labels of an axis with as many digits as tell neighbors apart.
function labels(at) {
  const apart = at.length > 1 ? Math.log10(Math.max(...at.map(Math.abs)) / (at[1] - at[0])) : 0;
  return at.map((v) => short(v, Math.min(15, Math.max(5, Math.ceil(apart) + 2))));
}

function axes(spec) {
  const ink = cssColor("soft"), grid = { stroke: cssColor("line"), width: 1 }, ticks = { show: false };
  const font = "12px system-ui, sans-serif";
  return [
    { stroke: ink, grid: { show: false }, ticks: { ...grid, size: 4 }, font, size: 34, values: (u, at) => at.map((v) => short(v)) },
    { stroke: ink, grid, ticks, font, size: spec.ySize || 54, splits: spec.ySplits, values: spec.yValues || ((u, at) => labels(at)) },
  ];
}

// Lines of which nothing is said: earlier forecasts, edges of a band.
function quiet(series) { return Boolean(series.faded || series.silent); }

function isKnown(chart, at) { return chart.spec.series.some((series, i) => !quiet(series) && chart.data[i + 1][at] !== null && chart.data[i + 1][at] !== undefined); }

function lineOf(series) {
  const color = cssColor(series.color || "a");
  return {
    label: series.label, class: quiet(series) ? "quiet" : undefined, stroke: series.faded ? color + "4d" : color, width: series.width ?? 1.6, dash: series.dash, spanGaps: true,
    fill: series.fill ? color + "99" : undefined, paths: series.stepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
    points: { show: series.points || false, size: 7, fill: color, stroke: color },
    value: (u, v, s, i) => (series.value ? series.value(v, i) : short(v)),
  };
}

function optionsOf(chart) {
  const spec = chart.spec;
  return {
    width: Math.max(200, chart.plot.clientWidth), height: spec.height || 170, pxAlign: 0,
    scales: { x: { time: false, range: spec.xRange && ((u, lo, hi) => chart.spec.xRange(u, lo, hi)) }, y: { range: spec.range || ((u, lo, hi) => (lo === null ? [0, 1] : lo === hi ? [lo - Math.abs(lo || 1) * 0.1, hi + Math.abs(hi || 1) * 0.1] : uPlot.rangeNum(lo, hi, 0.08, true))) } },
    axes: axes(spec), legend: { live: true, markers: { fill: (u, i) => (i ? cssColor(spec.series[i - 1].color || "a") : null) } }, padding: [8, 18, 0, 0],
    cursor: { sync: spec.sync ? { key: spec.sync } : undefined, drag: { x: true, y: false }, hover: { prox: 16 }, points: { size: (u, i) => (quiet(spec.series[i - 1]) ? 0 : 6) } },
    series: [{ label: spec.xLabel || "step", value: (u, v) => short(v) }, ...spec.series.map(lineOf)],
    hooks: { draw: [(u) => chart.spec.onDraw && chart.spec.onDraw(u)] },
    bands: (spec.bands || []).map((band) => ({ series: band.series, fill: cssColor(band.color) + (band.alpha || "33") })),
  };
}

// A table [x, ...columns] for uPlot.join: x ascending, of equal ones the last row.
function sorted(table) {
  const order = table[0].map((value, i) => [value, i]).sort((p, q) => p[0] - q[0]).map(([, i]) => i);
  const kept = order.filter((i, place) => place === order.length - 1 || table[0][order[place + 1]] !== table[0][i]);
  return table.map((values) => kept.map((i) => values[i]));
}

function described(chart) {
  const spec = chart.spec, x = chart.data[0];
  if (!x || !x.length) return `${spec.title}: no values yet`;
  const parts = spec.series.map((series, i) => [series, (series.raw ? series.raw() : chart.data[i + 1]).filter((v) => v !== null && v !== undefined)])
    .filter(([series, values]) => values.length && !quiet(series))
    .map(([series, values]) => {
      const lo = values.reduce((a, b) => Math.min(a, b)), hi = values.reduce((a, b) => Math.max(a, b));
      return `${series.label} last ${short(values.at(-1), 3)}, ${short(lo, 3)} to ${short(hi, 3)}`;
    });
  return `${spec.title}, ${spec.xLabel || "step"} ${short(x[0])} to ${short(x.at(-1))}. ${parts.join("; ")}`;
}

// The part of the x axis that the user has chosen; null for all of it.
function zoomOf(chart) {
  const { u } = chart;
  if (!u || !u.data[0].length || u.scales.x.min === null) return null;
  const ends = [u.data[0][0], u.data[0].at(-1)], [lo, hi] = chart.spec.xRange ? chart.spec.xRange(u, ...ends) : ends;
  const { min, max } = u.scales.x;
  return min <= lo && max >= hi ? null : { min, max };
}

function draw(chart, zoom = null) {
  if (chart.u) chart.u.destroy();
  chart.u = null;
  chart.plot.setAttribute("aria-label", described(chart));
  if (!chart.data[0] || !chart.data[0].length) { chart.plot.replaceChildren(el("p", { class: "note" }, "no values yet")); return; }
  chart.plot.replaceChildren();
  chart.u = new uPlot(optionsOf(chart), chart.data, chart.plot);
  chart.u.over.addEventListener("click", () => choose(chart));
  if (zoom) chart.u.setScale("x", zoom);
}

function choose(chart) {
  const at = chart.u && chart.u.cursor.idx;
  if (chart.spec.onChoose && at !== null && at !== undefined) chart.spec.onChoose(at);
}

function moved(chart, by) {
  const u = chart.u;
  if (!u) return;
  const last = chart.data[0].length - 1, from = u.cursor.idx;
  let at = from === null || from === undefined ? (by > 0 ? 0 : last) : Math.min(last, Math.max(0, from + by));
  while (!isKnown(chart, at) && at + Math.sign(by) >= 0 && at + Math.sign(by) <= last) at += Math.sign(by);
  u.setCursor({ left: u.valToPos(chart.data[0][at], "x"), top: u.over.clientHeight / 2 });
  chart.said.textContent = [chart.spec.xLabel || "step", short(chart.data[0][at]), ...chart.spec.series.flatMap((s, i) => (quiet(s) ? [] : [s.label, s.value ? s.value(chart.data[i + 1][at], at) : short(chart.data[i + 1][at])]))].join(" ");
}

function onKey(chart, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (by) moved(chart, by);
  else if (event.key === "Enter") choose(chart);
  else return;
  event.preventDefault();
}

const TABLE_ROWS = 200;
function tableOf(chart) {
  const shown = chart.spec.series.map((series, i) => [series, chart.data[i + 1]]).filter(([series]) => !quiet(series));
  const x = chart.data[0], known = x.map((_, i) => i).filter((i) => isKnown(chart, i)), rows = known.slice(-TABLE_ROWS);
  const row = (i) => el("tr", {}, el("th", { scope: "row", class: "number" }, short(x[i])), shown.map(([series, values]) => el("td", { class: "number" }, series.value ? series.value(values[i], i) : short(values[i]))));
  const head = el("tr", {}, el("th", { scope: "col" }, chart.spec.xLabel || "step"), shown.map(([series]) => el("th", { scope: "col" }, series.label)));
  return [el("p", { class: "note" }, rows.length < known.length ? `the last ${TABLE_ROWS} of ${known.length} rows` : `${known.length} rows`), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows.map(row))))];
}

// spec: title, series [{label, color, dash, ...}], bands, xLabel, onChoose(index). data: [x, ...columns].
function addChart(host, spec, data) {
  const chart = { spec, data, u: null, plot: el("div", { class: "plot", tabindex: "0", role: "img" }), said: el("p", { class: "note", role: "status" }) };
  const values = el("details", { ontoggle: () => { if (values.open) values.replaceChildren(values.firstChild, ...tableOf(chart)); } }, el("summary", {}, "values"));
  chart.plot.addEventListener("keydown", (event) => onKey(chart, event));
  chart.note = spec.note ? el("p", { class: "note" }, spec.note) : null;
  host.append(el("div", { class: spec.wide ? "figure wide" : "figure" }, el("h3", {}, spec.title), chart.note, chart.plot, chart.said, values));
  CHARTS.push(chart);
  draw(chart);
  return chart;
}

// What a chart has been built from, values and programs left out.
function lookOf({ title, note, ...look }) { return JSON.stringify(look); }

// A chart is built anew only where it looks otherwise; a part of the x axis that was chosen stays chosen.
function setData(chart, data, spec = chart.spec) {
  const same = chart.u && data[0].length && lookOf(spec) === lookOf(chart.spec);
  const zoom = spec.xLabel === chart.spec.xLabel ? zoomOf(chart) : null;
  Object.assign(chart, { data, spec });
  if (chart.note) chart.note.textContent = spec.note;
  if (!same) { draw(chart, zoom); return; }
  chart.u.setData(data, !zoom);
  if (zoom) chart.u.setScale("x", zoom);
  chart.plot.setAttribute("aria-label", described(chart));
}

let resizing = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => CHARTS.forEach((chart) => chart.u && chart.u.setSize({ width: Math.max(200, chart.plot.clientWidth), height: chart.spec.height || 170 })));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => CHARTS.forEach((chart) => draw(chart, zoomOf(chart))));

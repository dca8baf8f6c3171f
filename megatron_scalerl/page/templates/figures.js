"use strict";
// Which charts the page has, from the columns of the run.
const PHASES = [["pause", "a"], ["start", "b"], ["update", "c"], ["finish", "d"], ["verify", "e"], ["resume", "f"], ["needs", "g"], ["connect", "h"]];
const RUN = { data: DATA, axis: "compute", learning: null, charts: [] };

function column(name) { return RUN.data.steps[name]; }

function openStepAt(index) { openStep(column("step")[index]); }

function onAxis(forecast, i) {
  const compute = forecast.compute, share = i / (compute.length - 1);
  return RUN.axis === "compute" ? compute[i] : forecast.step + (forecast.end_step - forecast.step) * share;
}

function learning() {
  const { validation, forecasts, header } = RUN.data;
  const x = validation[RUN.axis === "compute" ? "compute" : "step"];
  const newest = forecasts.at(-1), earlier = forecasts.slice(0, -1);
  // in the order in which they are drawn: the newest forecast lies above the earlier ones
  const tables = earlier.map((each) => [each.compute.map((_, i) => onAxis(each, i)), each.pass_rate]);
  const series = earlier.map((each) => ({ label: `after step ${each.step}`, color: "g", faded: true, width: 1 }));
  tables.push([x, validation.pass_rate]);
  series.push({ label: "held-out pass rate", color: "a", points: true, width: 1.2 });
  const bands = [];
  if (newest) {
    tables.push([newest.compute.map((_, i) => onAxis(newest, i)), newest.pass_rate, newest.lo, newest.hi]);
    series.push({ label: `forecast after step ${newest.step}`, color: "b", dash: [8, 4], width: 2 }, { label: "90 % interval from", color: "b", width: 0.6 }, { label: "to", color: "b", width: 0.6 });
    bands.push({ series: [series.length, series.length - 1], color: "b" });
  }
  const usable = x.length ? uPlot.join(tables.map((table) => sorted(table))) : [[]];
  const spec = { title: "Validation pass rate and its forecasts", height: 320, wide: true, xLabel: RUN.axis === "compute" ? header.unit : "step", series, bands, ySize: 50,
    note: newest ? `Points: measured. Dashed: the newest forecast with its 90 % interval; gray: the ${earlier.length} before it.` : "Points: measured. A forecast needs four validations after step 0." };
  return { spec, data: usable };
}

function simple(title, ...lines) {
  return { title, series: lines.map(([, label, color, dash, points]) => ({ label, color, dash, points })), columns: lines.map(([name]) => name) };
}

const SIMPLE = [
  simple("Reward", ["reward", "mean reward", "a"]),
  simple("Training pass rate", ["train_pass_rate", "pass rate", "a"]),
  simple("Entropy, nats per token", ["entropy", "entropy", "a"]),
  simple("Gradient norm, before clipping", ["grad_norm", "norm", "a"]),
  simple("Learning rate", ["learning_rate", "rate", "a"]),
  simple("Mismatch, trainer against engine", ["mismatch_mean", "mean |log-prob difference|", "a"]),
  simple("Mismatch on the probe, same weights", ["probe_mismatch_mean", "mean", "a", undefined, true], ["probe_mismatch_max", "max", "b", [5, 3], true]),
  simple("Tokens of a completion", ["completion_tokens_mean", "mean", "a"]),
  simple("Truncated and interrupted", ["truncated_share", "truncated", "b"], ["interrupted_share", "interrupted", "a", [5, 3]]),
  simple("Staleness, optimizer steps", ["staleness_mean", "mean", "a"], ["staleness_max", "max", "b", [5, 3]]),
  simple("Groups without learning signal", ["degenerate", "groups filtered out", "a"]),
  simple("Generated tokens per second", ["generated_tokens_per_second", "tokens/s", "a"]),
  simple("Seconds of a step", ["step_seconds", "whole step", "a"], ["train_seconds", "forward, backward, optimizer", "b", [5, 3]]),
];

// Pass rates of each task of a mixture, or of its only task.
function tasks() {
  const { steps, validation } = RUN.data;
  const names = Object.keys(steps).filter((name) => name.startsWith("train_pass_rate/")).map((name) => name.slice(6));
  const tables = [[steps.step, ...names.map((name) => steps[`train_${name}`])], [validation.step, ...names.map((name) => validation[name])]];
  const line = (style) => (name, i) => ({ label: `${name.slice(10)}, ${style.points ? "held out" : "training"}`, color: "abcdefgh"[i % 8], ...style });
  return {
    spec: { title: "Pass rate by task", wide: true, height: 220, sync: "steps",
      note: "Lines: completions of each batch. Points: held-out prompts.",
      series: [...names.map(line({ width: 1 })), ...names.map(line({ points: true, width: 0, dash: [0, 1] }))] },
    data: steps.step.length || validation.step.length ? uPlot.join(tables.map((table) => sorted(table))) : [[]], known: names.length,
  };
}

function seconds(name) { return column(name).map((value) => value ?? 0); }

function share(name) { return column(name).map((value, i) => Math.min(1, (value ?? 0) / (column("step_seconds")[i] || 1))); }

function lanes() {
  // a point more than steps: each step is drawn from the end of the one before it
  const ahead = (values, first) => (values.length ? [first, ...values] : []);
  const hours = ahead(column("seconds").map((value) => (value ?? 0) / 3600), 0);
  const trainer = ahead(share("trainer_waits"), null), engines = ahead(share("engines_wait"), null);
  trainer[0] = trainer[1];
  engines[0] = engines[1];
  const said = (name) => (v, i) => (!i ? "–" : `${short(column(name)[i - 1], 3)} s`);
  const base = (value) => hours.map(() => value);
  const lane = (label, color, name) => ({ label, color, stepped: true, width: 1, value: said(name), raw: () => column(name) });
  const edge = (label, color) => ({ label, color, stepped: true, width: 1, silent: true, value: () => "" });
  return {
    spec: { title: "Who waits for whom", wide: true, height: 150, xLabel: "hours of steps", ySize: 104, range: () => [-0.05, 2.25],
      note: "Filled: the share of each step in which the trainer waited for a batch, or the engines for the trainer.",
      ySplits: () => [0.5, 1.65], yValues: () => ["engines wait", "trainer waits"], onChoose: (at) => openStepAt(Math.max(0, at - 1)),
      series: [lane("trainer waits", "a", "trainer_waits"), edge("", "a"), lane("engines wait", "b", "engines_wait"), edge("", "b")],
      bands: [{ series: [1, 2], color: "a", alpha: "99" }, { series: [3, 4], color: "b", alpha: "99" }] },
    data: hours.length ? [hours, trainer.map((v) => 1.15 + v), base(1.15), engines, base(0)] : [[], [], [], [], []],
  };
}

function updates() {
  const known = PHASES.filter(([phase]) => column(`weight_${phase}`).some((value) => value !== null));
  const stacked = [];
  let below = column("step").map(() => 0);
  for (const [phase] of known) stacked.push((below = seconds(`weight_${phase}`).map((value, i) => value + below[i])));
  const value = (phase) => (v, i) => (i === null || i === undefined ? "–" : short(column(`weight_${phase}`)[i], 3));
  return {
    spec: { title: "Weight update, seconds by phase (stacked)", wide: true, height: 190, sync: "steps", onChoose: openStepAt, range: (u, lo, hi) => [0, (hi || 1) * 1.05],
      note: phasesNote(known), onDraw: (u) => labelBands(u, known, stacked),
      series: known.map(([phase, color], i) => ({ label: phase, color, width: 1, value: value(phase), raw: () => column(`weight_${phase}`), fill: i === 0 })),
      bands: known.slice(1).map(([, color], i) => ({ series: [i + 2, i + 1], color, alpha: "99" })) },
    data: [column("step"), ...stacked],
  };
}

// Colors alone do not tell eight phases apart: the note has their order and seconds, the bands their names.
function phasesNote(known) {
  if (!known.length) return "No weight update is recorded yet.";
  const median = (values) => values.sort((p, q) => p - q)[Math.floor(values.length / 2)];
  const each = known.map(([phase]) => `${phase} ${short(median(column(`weight_${phase}`).filter((v) => v !== null)), 3)} s`);
  return `From the bottom up, with medians: ${each.join(", ")}.`;
}

// The name of each phase in its band, where the band is thickest, if it is as thick there as the letters.
function labelBands(u, known, stacked) {
  const { ctx } = u, pixel = u.bbox.width / u.over.clientWidth, { min, max } = u.scales.x;
  ctx.save();
  Object.assign(ctx, { font: `${11 * pixel}px system-ui, sans-serif`, textAlign: "center", textBaseline: "middle", lineWidth: 3 * pixel, lineJoin: "round", strokeStyle: cssColor("panel"), fillStyle: cssColor("ink") });
  known.forEach(([phase], k) => {
    const bottom = (i) => (k ? stacked[k - 1][i] : 0);
    let at = -1;
    u.data[0].forEach((x, i) => { if (x >= min && x <= max && (at < 0 || stacked[k][i] - bottom(i) > stacked[k][at] - bottom(at))) at = i; });
    if (at < 0) return;
    const high = u.valToPos(stacked[k][at], "y", true), low = u.valToPos(bottom(at), "y", true);
    if (low - high < 13 * pixel) return;
    const half = ctx.measureText(phase).width / 2 + 3 * pixel;
    const x = Math.min(u.bbox.left + u.bbox.width - half, Math.max(u.bbox.left + half, u.valToPos(u.data[0][at], "x", true)));
    ctx.strokeText(phase, x, (high + low) / 2);
    ctx.fillText(phase, x, (high + low) / 2);
  });
  ctx.restore();
}

function drawFigures() {
  const first = learning();
  RUN.learning = addChart(byId("learning"), first.spec, first.data);
  const host = byId("figures");
  for (const each of SIMPLE) {
    const chart = addChart(host, { ...each, sync: "steps", onChoose: openStepAt }, [column("step"), ...each.columns.map(column)]);
    RUN.charts.push([chart, () => ({ data: [column("step"), ...each.columns.map(column)] })]);
  }
  for (const made of [...(tasks().known ? [tasks] : []), lanes, updates]) {
    const { spec, data } = made();
    RUN.charts.push([addChart(host, spec, data), made]);
  }
}

function redrawFigures() {
  for (const [chart, made] of [[RUN.learning, learning], ...RUN.charts]) {
    const { spec, data } = made();
    setData(chart, data, spec);
  }
}

"use strict";
// Choose a step and a group, read its completions. In a file the groups are in DATA; on a server they are asked for.
const BUCKETS = [0.05, 0.3, 0.7, 1.5, 3];
const SCORED = { mismatch: [0.001, 0.01, 0.05, 0.2, 1], entropy: [0.01, 0.1, 0.5, 1, 2] };  // of completions that the trainer scored
const VALUES = { mismatch: "mismatch", entropy: "entropies" };
const CHUNK = 4000;  // tokens that are put into the page at a time
const MOST_HITS = 5000;

const SOURCE = DATA.live
  ? {
      steps: () => RUN.data.trained_steps,
      groups: (step) => ask("groups", { step }).then((answer) => answer.groups),
      group: (id) => ask("group", { id }),
      completion: (id, index) => ask("completion", { id, index }),
    }
  : {
      steps: () => [...new Set(DATA.groups.map((group) => group.step))].sort((p, q) => p - q),
      groups: async (step) => DATA.groups.filter((group) => group.step === step),
      group: async (id) => {
        const found = DATA.groups.find((group) => group.id === id);
        for (const each of found.completions) each.text ??= each.content.pieces.join("");
        return found;
      },
      completion: async (id, index) => DATA.groups.find((group) => group.id === id).completions[index].content,
    };

const SORTS = {
  "as generated": (p, q) => p.index - q.index,
  "best first": (p, q) => q.reward - p.reward || (q.logprob ?? -9) - (p.logprob ?? -9),
  "worst first": (p, q) => p.reward - q.reward || (p.logprob ?? -9) - (q.logprob ?? -9),
  "longest first": (p, q) => q.tokens - p.tokens,
  "least likely first": (p, q) => (p.logprob ?? 0) - (q.logprob ?? 0),
};
const COLORS = {
  "log-probability": "how unlikely the engine found a token it sampled",
  mismatch: "log-probability of the trainer minus the engine's, nats",
  entropy: "entropy of the distribution that the token was sampled from, nats",
  advantage: "advantage of the completion, the same for all its sampled tokens",
  staleness: "optimizer steps between the version that sampled a token and the one trained",
  none: "",
};

const BRACKETS = { forced: ["⟦", "⟧"], environment: ["\n⟪", "⟫\n"] };  // by origin of tokens that were not sampled

const state = { step: null, group: null, index: null, content: null, sort: "best first", color: "log-probability", query: "", hits: [], hit: -1, at: -1, spans: [], shown: 0, asked: 0, listed: 0 };

function select(id, label, values, chosen, onchange) {
  const made = el("select", { id, onchange: (event) => onchange(event.target.value) });
  setOptions(made, values, chosen);
  return el("label", { for: id }, label, made);
}

// The element stays, and with it the focus of who chooses by keyboard; further options are added, others replaced.
function setOptions(list, values, chosen) {
  const known = [...list.options], made = values.map(([value, text]) => el("option", { value }, text));
  const begins = known.length <= made.length && known.every((option, i) => option.value === made[i].value && option.textContent === made[i].textContent);
  if (begins) list.append(...made.slice(known.length));
  else list.replaceChildren(...made);
  if (chosen !== null && list.value !== String(chosen)) list.value = String(chosen);
}

function fail(error) { fill("group", el("p", { class: "verdict stop", role: "alert" }, error.message)); }

// Only the answer to the newest question is shown.
async function latest(question, use) {
  const number = ++state.asked;
  try {
    const answer = await question;
    if (number === state.asked) await use(answer);
  } catch (error) {
    if (number === state.asked) fail(error);
  }
}

async function openStep(step) {
  const steps = SOURCE.steps();
  if (!steps.length) return;
  state.step = steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);
  await latest(SOURCE.groups(state.step), async (groups) => {
    showControls(steps, groups);
    if (groups.length) await openGroup(groups[0].id);
    else fill("group", el("p", { class: "note" }, "no group of this step is stored"));
  });
}

async function openGroup(id) {
  await latest(SOURCE.group(id), async (group) => {
    state.group = group;
    showGroup();
    const first = inOrder()[0];
    if (first) await openCompletion(first.index);
  });
}

async function openCompletion(index) {
  state.index = index;
  for (const button of byId("list").children) button.setAttribute("aria-current", String(Number(button.dataset.index) === index));
  await latest(SOURCE.completion(state.group.id, index), (content) => {
    state.content = content;
    showText();
  });
}

function stepOptions(steps) { return steps.map((step) => [step, String(step)]); }

function showControls(steps, groups) {
  if (!byId("step")) makeControls();
  setOptions(byId("step"), stepOptions(steps), state.step);
  setOptions(byId("pick"), groups.map((group) => [group.id, `${group.id}, pass rate ${short(group.pass_rate, 3)}`]), groups.length ? groups[0].id : null);
}

function makeControls() {
  fill("controls",
    select("step", "step", [], null, (value) => openStep(Number(value))),
    select("pick", "group", [], null, (value) => openGroup(Number(value))),
    select("sort", "order", Object.keys(SORTS).map((name) => [name, name]), state.sort, (value) => { state.sort = value; showList(); }),
    select("color", "color of tokens", Object.keys(COLORS).map((name) => [name, name]), state.color, (value) => { state.color = value; showText(); }),
    el("label", { for: "search" }, "search in the group", el("input", { id: "search", type: "search", value: state.query, autocomplete: "off", oninput: (event) => search(event.target.value), onkeydown: onSearchKey })),
    el("button", { type: "button", id: "next-hit", onclick: () => goToHit(1) }, "next hit"),
    el("span", { id: "found", role: "status" }));
}

function inOrder() {
  const query = state.query.toLowerCase();
  return state.group.completions.filter((each) => !query || each.text.toLowerCase().includes(query)).sort(SORTS[state.sort]);
}

function showGroup() {
  const group = state.group;
  const facts = [`group ${group.id}`, group.task && `task ${group.task}`, `epoch ${group.epoch}`, group.step === null ? "in no batch yet" : `trained in step ${group.step} from version ${group.policy_version}`, `pass rate ${short(group.pass_rate, 3)}`, `reference ${group.answer}`];
  fill("group", el("p", { class: "note" }, facts.filter(Boolean).join(", ")), el("pre", { class: "text prompt", tabindex: "0", "aria-label": "prompt" }, group.prompt),
    el("div", { class: "columns" }, el("div", { class: "list", id: "list", role: "group", "aria-label": "completions" }), el("div", {}, el("p", { class: "note", id: "facts" }), el("p", { class: "note key", id: "key" }), el("p", { class: "detail", id: "detail", role: "status" }), el("div", { class: "text", id: "text", tabindex: "0", role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": "completion; arrow keys read its tokens", onkeydown: onTokenKey, onclick: onTokenClick, onmouseover: onTokenHover }))));
  showList();
}

function showList() {
  if (!state.group) return;
  const shown = inOrder();
  fill("list", shown.map((each) => el("button", { type: "button", "data-index": each.index, "aria-current": String(each.index === state.index), onclick: () => openCompletion(each.index) },
    el("span", { class: each.correct ? "right" : "wrong" }, `${each.correct ? "✓ right" : "✗ wrong"} ${each.reward >= 0 ? "+" : ""}${short(each.reward)}${each.reason ? ` (${each.reason})` : ""}`),
    el("small", {}, [`#${each.index}`, `${each.tokens} tokens`, each.turns > 1 && `${each.turns} turns`, each.truncated && "truncated", each.interrupted && "interrupted", each.scored && "scored", `log-prob ${short(each.logprob, 3)}`].filter(Boolean).join(" · ")))));
  state.listed = shown.length;
  showFound();
}

function showFound() {
  const place = state.hit < 0 ? `${state.hits.length}${state.hits.length === MOST_HITS ? " or more" : ""}` : `${state.hit + 1} of ${state.hits.length}`;
  const hits = state.hits.length ? `; hit${state.hit < 0 && state.hits.length !== 1 ? "s" : ""} in this one: ${place}` : "";
  byId("found").textContent = state.query ? `${state.listed} of ${state.group.completions.length} completions${hits}` : "";
}

function bucket(value, edges = BUCKETS) { return edges.filter((edge) => value >= edge).length; }

function colorOf(token, span) {
  if (state.color === "none" || span.origin) return "";
  if (state.color === "log-probability") { const level = bucket(-state.content.logprobs[token]); return level ? `warm${level}` : ""; }
  if (SCORED[state.color]) {
    const value = state.content[VALUES[state.color]]?.[token] ?? 0, level = bucket(Math.abs(value), SCORED[state.color]);
    return level ? `${state.color === "entropy" ? "violet" : value > 0 ? "cool" : "warm"}${level}` : "";
  }
  if (state.color === "staleness") { const level = Math.min(5, Math.ceil(span.staleness / 2)); return level > 0 ? `violet${level}` : ""; }
  const advantage = state.group.completions[state.index].advantage;
  const level = advantage ? Math.min(5, 1 + Math.floor(Math.abs(advantage) * 2)) : 0;
  return level ? `${advantage > 0 ? "cool" : "warm"}${level}` : "";
}

function spanOf(token) {
  let found = null;
  for (const [first, version, origin] of state.content.spans) if (first <= token) found = { first, version, origin };
  const trained = state.group.policy_version;
  return { ...found, staleness: trained === null ? 0 : trained - found.version };
}

function showText() {
  if (!state.content) return;
  Object.assign(state, { at: -1, spans: [], shown: 0, hits: [], hit: -1 });
  const each = state.group.completions[state.index];
  const advantage = each.advantage === null ? `no advantage: ${each.untrained}` : `advantage ${short(each.advantage, 3)}`;
  byId("facts").textContent = [`completion ${each.index}`, `${each.sampled} sampled of ${each.tokens} tokens`, each.turns > 1 && `${each.turns} turns, ${each.environment_tokens} tokens of the environment`, `versions ${each.versions.join(" to ")}`, advantage, `thinking cut at ${each.thinking_cut || "none"}`, `seed ${each.seed}`].filter(Boolean).join(", ");
  showKey();
  byId("detail").textContent = "";
  byId("text").replaceChildren();
  showMore();
  markHits();
}

function showKey() {
  const levels = { "log-probability": ["warm", ["p > 0.95", "> 0.74", "> 0.5", "> 0.22", "> 0.05", "less"]], staleness: ["violet", ["0", "1–2", "3–4", "5–6", "7–8", "more"]] }[state.color];
  const marks = [el("span", { class: "forced" }, "⟦forced⟧"), " not sampled, no loss; ", el("b", { class: "version" }, "‹v7›"), " policy version 7 takes over"];
  if (state.content.spans.some(([, , origin]) => origin === "environment")) marks.push("; ", el("span", { class: "environment" }, "⟪environment⟫"), " written by the environment, no loss");
  const edges = SCORED[state.color];
  if (edges && !state.content.mismatch) fill("key", "the trainer did not score this completion: those with “scored” in the list, with telemetry.token_scores_every. ", marks);
  else if (edges) {
    const ranges = [`< ${edges[0]}`, ...edges.map((edge, i) => (i + 1 < edges.length ? `${edge} to ${edges[i + 1]}` : `more`))];
    const rows = (tone) => ranges.map((text, i) => el("span", { class: i ? `${tone}${i}` : "" }, text));
    if (state.color === "entropy") fill("key", `${COLORS.entropy}: `, rows("violet"), marks);
    else fill("key", `${COLORS.mismatch}: below 0 `, rows("warm"), " above 0 ", rows("cool"), marks);
  }
  else if (levels) fill("key", `${COLORS[state.color]}: `, levels[1].map((text, i) => el("span", { class: i ? `${levels[0]}${i}` : "" }, text)), marks);
  else if (state.color === "advantage") fill("key", `${COLORS.advantage}: `, el("span", { class: "warm4" }, "below 0"), el("span", { class: "cool4" }, "above 0"), marks);
  else fill("key", marks);
}

function showMore() {
  const { pieces } = state.content, text = byId("text"), end = Math.min(pieces.length, state.shown + CHUNK), parts = [];
  let spanAt = spanOf(state.shown || 0), before = state.shown ? spanOf(state.shown - 1) : null;
  const begins = new Set(state.content.spans.map(([first]) => first)), starts = state.content.parts;
  for (let token = state.shown; token < end; token += 1) {
    if (begins.has(token)) spanAt = spanOf(token);
    if (before === null || spanAt.first !== before.first) {
      if (before && before.origin) parts.push(el("b", { class: "bracket" }, BRACKETS[before.origin][1]));
      if (starts.length > 1 && starts.includes(token)) parts.push(el("b", { class: "part" }, `part ${starts.indexOf(token) + 1} of ${starts.length}`));
      if (before === null || spanAt.version !== before.version) parts.push(el("b", { class: "version" }, `‹v${spanAt.version}›`));
      if (spanAt.origin) parts.push(el("b", { class: "bracket" }, BRACKETS[spanAt.origin][0]));
      before = spanAt;
    }
    const made = el("span", { class: spanAt.origin || colorOf(token, spanAt) || null, "data-token": token }, pieces[token]);
    state.spans.push(made);
    parts.push(made);
  }
  if (end === pieces.length && before && before.origin) parts.push(el("b", { class: "bracket" }, BRACKETS[before.origin][1]));
  text.querySelector("button")?.remove();
  state.shown = end;
  text.append(...parts);
  markShown();
  if (end < pieces.length) text.append(el("button", { type: "button", onclick: showMore }, `show the next of ${pieces.length - end} further tokens`));
}

function tell(token) {
  if (!(token >= 0 && token < state.spans.length)) return;
  state.spans[state.at]?.classList.remove("at");
  state.at = token;
  state.spans[token].classList.add("at");
  const span = spanOf(token), p = state.content.logprobs[token], piece = state.content.pieces[token];
  const said = span.origin || `log-prob ${short(p, 3)} (p ${short(Math.exp(p), 3)})`;
  const { mismatch, entropies } = state.content;
  const trainer = mismatch && !span.origin ? `, mismatch ${short(mismatch[token], 3)}, entropy ${short(entropies[token], 3)}` : "";
  byId("detail").textContent = `token ${token}: ${JSON.stringify(piece.slice(0, 80))}, id ${state.content.ids[token]}, ${said}${trainer}, version ${span.version}, staleness ${span.staleness}`;
}

function onTokenKey(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  tell(Math.max(0, Math.min(state.spans.length - 1, state.at + by)));
  state.spans[state.at]?.scrollIntoView({ block: "nearest" });
}

function onTokenClick(event) { const token = event.target.dataset.token; if (token !== undefined) tell(Number(token)); }
function onTokenHover(event) { if (state.at < 0 || !event.target.closest("#text:focus")) onTokenClick(event); }

function search(query) {
  Object.assign(state, { query, hits: [], hit: -1 });
  if (!state.group) return;
  showList();
  const shown = inOrder();
  if (shown.length && !shown.some((each) => each.index === state.index)) openCompletion(shown[0].index);
  else markHits();
}

// Hits in the whole completion, [first token, token behind it], also in what is not on the page yet.
function markHits() {
  for (const span of state.spans) span.classList.remove("hit");
  Object.assign(state, { hits: [], hit: -1 });
  const query = state.query.toLowerCase();
  if (query && state.content) {
    const starts = [], pieces = state.content.pieces.map((piece) => piece.toLowerCase());
    let length = 0;
    for (const piece of pieces) { starts.push(length); length += piece.length; }
    const whole = pieces.join("");
    for (let at = whole.indexOf(query), token = 0; at >= 0 && state.hits.length < MOST_HITS; at = whole.indexOf(query, at + query.length)) {
      while (token + 1 < starts.length && starts[token + 1] <= at) token += 1;
      let end = token + 1;
      while (end < starts.length && starts[end] < at + query.length) end += 1;
      state.hits.push([token, end]);
    }
  }
  markShown();
  showFound();
}

function markShown() {
  for (const [first, end] of state.hits) for (let i = first; i < Math.min(end, state.spans.length); i += 1) state.spans[i].classList.add("hit");
}

function goToHit(by) {
  const count = state.hits.length;
  if (!count) return;
  state.hit = state.hit < 0 ? (by > 0 ? 0 : count - 1) : (state.hit + by + count) % count;
  const [token] = state.hits[state.hit];
  while (state.shown <= token) showMore();
  tell(token);
  state.spans[token].scrollIntoView({ block: "center" });
  showFound();
}

function onSearchKey(event) {
  if (event.key !== "Enter") return;
  event.preventDefault();
  goToHit(event.shiftKey ? -1 : 1);
}

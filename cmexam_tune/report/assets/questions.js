// The questions: filters, search, cards, a link to each, and a CSV of what is chosen.

const PAGE_SIZE = 20;
const EVERYTHING = {state: "all", facet: -1, values: [], text: "", page: 0, sort: "", run: 0, other: null, change: null, cell: null, conflicts: false, profile: null, id: null};
const view = {...EVERYTHING, state: "wrong"};
const STATES = {
  right: ["right", "答对"], wrong: ["wrong", "答错"], unreadable: ["unreadable", "无法解析"], unknown: ["no published answer", "答案未公布"],
};
const oneOf = answer => !answer ? "unreadable" : answer.length > 1 ? "several" : answer;

// Whether question i passes every filter but the text search.
function passes(i) {
  const {gold, answers, of, values} = Store.index;
  if (view.id != null) return Store.index.ids[i] === view.id;
  const state = Store.state(i, view.run);
  if (view.state === "failed" ? state === "right" : view.state !== "all" && state !== view.state) return false;
  if (view.facet >= 0 && view.values.length && !view.values.includes(values[view.facet][of[view.facet][i]])) return false;
  if (view.cell && !(gold[i] && oneOf(gold[i]) === view.cell[0] && oneOf(answers[view.run][i]) === view.cell[1])) return false;
  if (view.profile && !(i in Store.index.readings[view.profile])) return false;
  if (view.change) {
    const [before, after] = [view.other, view.run].map(run => Store.state(i, run) === "right");
    if (gold[i] == null || before === after || after !== (view.change === "gained")) return false;
  }
  return true;
}

async function chosen() {
  const conflicts = view.conflicts ? new Set(Store.index.conflicts) : null;
  let found = Store.index.ids.map((_, i) => i).filter(i => (!conflicts || conflicts.has(i)) && passes(i));
  const needle = view.text.trim().toLowerCase();
  if (needle) {
    const kept = [];
    for (const i of found) {
      const {stem, options, reference, outputs} = await Store.texts(i);
      if ([Store.index.ids[i], stem, ...options.map(option => option[1]), reference, ...outputs].join("\n").toLowerCase().includes(needle)) kept.push(i);
    }
    found = kept;
  }
  if (view.sort === "rougeL") {
    const score = Store.index.rougeL;
    found = found.filter(i => score[i] != null).sort((a, b) => score[a] - score[b]);
  }
  return found;
}

// Text with the search words marked.
function marked(text) {
  const needle = view.text.trim().toLowerCase(), lower = text.toLowerCase();
  if (!needle || lower.length !== text.length) return escape(text);
  let html = "", at = 0, next;
  while ((next = lower.indexOf(needle, at)) >= 0) {
    html += escape(text.slice(at, next)) + `<mark>${escape(text.slice(next, next + needle.length))}</mark>`;
    at = next + needle.length;
  }
  return html + escape(text.slice(at));
}

function output(title, text) {
  return `<div><h4>${title}</h4><pre>${text ? marked(text) : "∅"}</pre></div>`;
}

async function card(i) {
  const {ids, gold, answers, rougeL, readings} = Store.index, {stem, options, reference, outputs, facts: told} = await Store.texts(i);
  const state = Store.state(i, view.run), right = gold[i] || "", given = answers[view.run][i] || "";
  const optionLines = options.map(([letter, text]) =>
    `<li class="${right.includes(letter) ? "gold" : given.includes(letter) ? "miss" : ""}">${escape(letter)} ${marked(text)} ${right.includes(letter) ? "✓" : ""}${given.includes(letter) ? " ←" : ""}</li>`);
  const tags = R.facets.map((facet, f) => [facet, Store.index.values[f][Store.index.of[f][i]]]).filter(([, value]) => value);
  const runs = R.run_names.length > 1 ? [...new Set([view.other, view.run].filter(run => run != null))] : [0];
  const facts = [
    `${both("right answer", "标准答案")} <b>${escape(right || "?")}</b>`,
    ...runs.map(run => `${runs.length > 1 ? phrase(R.run_names[run]) : both("given", "模型所答")} <b>${escape(answers[run][i] || "–")}</b>`
      + told[run].map(([fact, text]) => ` ${both(...R.facts[fact])} <code>${escape(text)}</code>`).join("")),
    ...(rougeL[i] != null ? [`ROUGE-L ${rougeL[i].toFixed(1)}`] : []),
    ...(view.profile ? [`${escape(view.profile)} <b>${escape(readings[view.profile][i] || "–")}</b>`] : []),
  ];
  return `<article class="card ${state}"><b class="verdict">${both(...STATES[state])}</b> <small><a href="#q=${encodeURIComponent(ids[i])}">${escape(ids[i])}</a> · ${facts.join(" · ")}</small>
    <div class="stem">${marked(stem)}</div><ul class="options">${optionLines.join("")}</ul>
    <div>${tags.map(([facet, value]) => `<span class="tag" title="${escape(word(facetName(facet).en, facetName(facet).zh))}">${both(escape(named(facet, value).en), escape(named(facet, value).zh))}</span>`).join("")}</div>
    <div class="two">${runs.map(run => output(runs.length > 1 ? phrase(R.run_names[run]) : both("Output", "模型输出"), outputs[run])).join("")}
    ${output(both("Reference explanation", "参考解析"), reference)}</div></article>`;
}

let drawing = 0;
async function drawQuestions() {
  if (!Store.ready) return;
  const mine = ++drawing, found = await chosen(), pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
  view.page = Math.min(Math.max(0, view.page), pages - 1);
  const cards = await Promise.all(found.slice(view.page * PAGE_SIZE, (view.page + 1) * PAGE_SIZE).map(card));
  if (mine !== drawing) return;  // a later choice has overtaken this one
  const special = view.id != null || view.cell || view.change || view.conflicts || view.profile;
  byId("found").innerHTML = both(`${count(found.length)} questions`, `${count(found.length)} 题`) + (special ? ` <button class="link" id="clear" type="button">${both("show all again", "取消筛选")}</button>` : "");
  byId("cards").innerHTML = cards.join("");
  byId("where").textContent = `${view.page + 1} / ${pages}`;
  byId("previous").disabled = !view.page;
  byId("next").disabled = view.page >= pages - 1;
  if (byId("clear")) byId("clear").onclick = () => { if (view.id != null) history.replaceState(null, "", "#questions"); show({}, false); };
}

const option = (value, chosenValue, text) => `<option value="${escape(value)}" ${value === chosenValue ? "selected" : ""}>${escape(text)}</option>`;

function drawControls() {
  if (!Store.ready) return;
  byId("state").innerHTML = option("all", view.state, word("all questions", "全部题目")) +
    ["right", "wrong", "unreadable"].map(state => option(state, view.state, word(...STATES[state]))).join("") + option("failed", view.state, word("wrong or unreadable", "答错或无法解析"));
  byId("run").hidden = R.run_names.length < 2;
  byId("run").innerHTML = R.run_names.map((name, i) => option(String(i), String(view.run), said(name))).join("");
  byId("facet").innerHTML = option("-1", String(view.facet), word("any category", "全部类别")) + R.facets.map((facet, i) => option(String(i), String(view.facet), word(facetName(facet).en, facetName(facet).zh))).join("");
  const values = view.facet < 0 ? [] : Store.index.values[view.facet].filter(Boolean);
  byId("value").innerHTML = option("", "", word("all", "全部")) + values.map(value => option(value, view.values.length ? view.values[0] : null, word(named(R.facets[view.facet], value).en, named(R.facets[view.facet], value).zh))).join("");
  byId("value").hidden = view.facet < 0;
  const scored = Store.index.rougeL.some(score => score != null);
  byId("sort").hidden = !scored;
  byId("sort").innerHTML = option("", view.sort, word("in file order", "按文件顺序")) + option("rougeL", view.sort, word("lowest ROUGE-L first", "ROUGE-L 从低到高"));
  byId("text").value = view.text;
  byId("text").placeholder = word("search questions, options, outputs", "搜索题目、选项、输出");
  drawQuestions();
}

function show(change, scroll = true) {
  Object.assign(view, EVERYTHING, change);
  drawControls();
  if (scroll) byId("questions").scrollIntoView({behavior: "smooth"});
}

// What a click on a bar, a line, a cell or a link asks for.
function go(target) {
  if (target.facet) show({facet: R.facets.indexOf(target.facet), values: target.values});
  else if (target.cell) show({cell: target.cell});
  else if (target.change) show({change: target.change, other: target.first, run: target.second});
  else if (target.conflicts) show({conflicts: true});
  else if (target.sort) show({sort: target.sort});
  else if (target.profile) show({profile: target.profile});
}

// Cells that a spreadsheet would take for a formula get an apostrophe.
const csvCell = text => `"${String(text ?? "").replace(/^[=+\-@\t\r]/, "'$&").replace(/"/g, '""')}"`;

async function saveCsv() {
  const lines = [["id", "question", "options", "gold", "answer", "state", "output", "reference", ...R.facets]];
  for (const i of await chosen()) {
    const {stem, options, reference, outputs} = await Store.texts(i);
    const facetValues = R.facets.map((_, f) => Store.index.values[f][Store.index.of[f][i]]);
    lines.push([Store.index.ids[i], stem, options.map(([letter, text]) => `${letter} ${text}`).join("\n"), Store.index.gold[i], Store.index.answers[view.run][i], Store.state(i, view.run), outputs[view.run], reference, ...facetValues]);
  }
  const link = document.createElement("a");
  // The mark at the start makes Excel read UTF-8.
  link.href = URL.createObjectURL(new Blob(["\ufeff" + lines.map(line => line.map(csvCell).join(",")).join("\r\n") + "\r\n"], {type: "text/csv"}));
  link.download = `${view.state === "all" ? "questions" : view.state}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function questions() {
  section("questions", "Questions", "逐题查看", `<div class="tools"><select id="state"></select><select id="run"></select><select id="facet"></select><select id="value"></select><select id="sort"></select>
    <input id="text" type="search"><button id="csv" type="button">CSV ↓</button><span id="found"></span><span class="fill"></span><button id="previous" type="button">←</button><span id="where"></span><button id="next" type="button">→</button></div>
    <div id="cards"><p class="soft">${both("Opening …", "正在打开……")}</p></div>`);
  const on = (id, change) => { byId(id).onchange = event => { Object.assign(view, {page: 0, id: null}, change(event.target.value)); drawControls(); }; };
  on("state", value => ({state: value}));
  on("run", value => ({run: +value, change: null}));
  on("facet", value => ({facet: +value, values: []}));
  on("value", value => ({values: value ? [value] : []}));
  on("sort", value => ({sort: value}));
  let wait;
  byId("text").oninput = event => {
    clearTimeout(wait);
    wait = setTimeout(() => { Object.assign(view, {text: event.target.value, page: 0}); drawQuestions(); }, 250);
  };
  byId("previous").onclick = () => { view.page--; drawQuestions(); };
  byId("next").onclick = () => { view.page++; drawQuestions(); };
  byId("csv").onclick = saveCsv;
}

questions();

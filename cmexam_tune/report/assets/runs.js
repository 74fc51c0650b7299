// Several runs: a leaderboard, mean and deviation, and any two of them question by question.

const pair = {first: 0, second: 1};
const SECOND_MINUS_FIRST = both("second minus first", "后者减前者");

function leaderboard() {
  const entries = Object.entries(R.runs).map(([name, scores]) => ({name: phrase(name), scores}));
  entries.sort((a, b) => (b.scores.accuracy ?? -1) - (a.scores.accuracy ?? -1));
  return scoreTable(entries);
}

function spread() {
  const lines = Object.entries(R.summary).map(([key, one]) => ({cells: [heading(key), number(one.mean, key, 2), number(one.std, key, 2), count(one.runs)]}));
  return `<h3>${both("Mean and deviation of the runs", "多次运行的均值与标准差")}</h3>` +
    table(["", both("mean", "均值"), both("deviation", "标准差"), both("runs", "次数")], lines, {sortable: false});
}

// A p-value, never below what its test can show.
const atLeast = (p, resolution = 0) => p <= Math.max(resolution, 1e-4) ? `&lt; ${Math.max(resolution, 1e-4).toPrecision(1)}` : p.toFixed(4);

function baselineMetrics() {
  const lines = Object.entries(R.comparison.metrics).map(([key, one]) => ({
    cells: [heading(key), signed(one.difference, 2), `<span class="nowrap">${one.low.toFixed(2)} … ${one.high.toFixed(2)}</span>`, atLeast(one.p_value, one.resolution)],
  }));
  const {n, smallest_difference: smallest} = R.comparison;
  return `<h3>${both(`${escape(R.comparison.name)} | ${escape(R.name)}`, `${escape(inChinese(R.comparison.name))} | ${escape(inChinese(R.name))}`)}</h3>` +
    table(["", SECOND_MINUS_FIRST, both("95% interval", "95% 区间"), "p"], lines, {sortable: false}) +
    (smallest == null ? "" : `<p class="soft">${both(
      `${count(n)} questions detect a difference of ${smallest.toFixed(1)} points with 80% power.`,
      `以这 ${count(n)} 道题，${smallest.toFixed(1)} 个百分点的差异有 80% 的把握被检出。`)}</p>`);
}

// Each two runs, corrected for being several.
function allPairs() {
  const lines = R.pairs.map(one => ({
    cells: [`${phrase(one.first)} | ${phrase(one.second)}`, signed(one.difference, 2), atLeast(one.p_value), atLeast(one.adjusted_p), one.smallest_difference == null ? "–" : one.smallest_difference.toFixed(1)],
  }));
  return `<h3>${both("Pairwise (second minus first)", "两两比较（后者减前者）")}</h3>` + table(["", SECOND_MINUS_FIRST, "p", both("p, Holm", "p（Holm 校正）"), both("smallest detectable", "可检出的最小差异")], lines, {wide: [2, 4]});
}

// The pair as a sentence, with the cards behind it one click away.
function pairSentence() {
  const [a, b] = [Math.min(pair.first, pair.second), Math.max(pair.first, pair.second)];
  const found = R.flips_of.find(one => one.runs[0] === a && one.runs[1] === b);
  if (!found) return `<p class="soft">${both("Choose two different runs.", "请选择两次不同的运行。")}</p>`;
  const [lost, gained] = pair.first === a ? found.only : [...found.only].reverse();
  const [before, after] = [pair.first, pair.second].map(i => `<b>${phrase(R.run_names[i])}</b>`);
  const p = found.p < 1e-4 ? "< 0.0001" : `= ${found.p.toPrecision(2)}`;
  const verdict = found.p < 0.05 ? both("Chance alone would hardly give this difference.", "差异难以用偶然解释。") : both("<b>This difference can be chance.</b>", "<b>这一差异可能只是偶然。</b>");
  const link = (change, en, zh, n) => `<button class="link" data-go="${escape(JSON.stringify({change, first: pair.first, second: pair.second}))}">${both(`${n} ${en}`, `${n} 题${zh}`)}</button>`;
  return `<p>${both(`From ${before} to ${after}: `, `与 ${before} 相比，${after}：`)}${link("gained", "newly right", "由错转对", gained)} · ${link("lost", "newly wrong", "由对转错", lost)}
    <br><span class="soft">${both("McNemar's exact test", "McNemar 精确检验")}: p ${p}. ${verdict}</span></p>`;
}

function pairFacets() {
  return Store.facets().map(({name, values}, facet) => {
    const lines = values.map((value, i) => {
      const [first, second] = [pair.first, pair.second].map(run => Store.accuracy(run, facet, i));
      const difference = first.n && second.n ? second.accuracy - first.accuracy : null;
      return {name: value, ...named(name, value), n: first.n, first, second, difference};
    }).filter(line => line.name && line.difference != null).sort((a, b) => b.n - a.n).slice(0, 40);
    if (!lines.length) return "";
    const cells = line => ({
      go: {facet: name, values: [line.name]},
      cells: [both(escape(line.en), escape(line.zh)), {html: count(line.n), sort: line.n}, {html: line.first.accuracy.toFixed(1), sort: line.first.accuracy}, {html: line.second.accuracy.toFixed(1), sort: line.second.accuracy},
        {html: `<span class="${line.difference > 0 ? "up" : line.difference < 0 ? "down" : ""}">${signed(line.difference)}</span>`, sort: line.difference}],
    });
    return `<details><summary>${both(escape(name), escape(facetName(name).zh))}</summary>${table(["", "n", "A", "B", "B − A"], lines.map(cells))}</details>`;
  }).join("");
}

function drawPair() {
  if (!byId("pair")) return;
  for (const side of ["first", "second"]) {
    byId(side).innerHTML = R.run_names.map((name, i) => `<option value="${i}" ${i === pair[side] ? "selected" : ""}>${escape(said(name))}</option>`).join("");
  }
  byId("pair").innerHTML = pairSentence();
  if (Store.ready && pair.first !== pair.second) byId("pair-facets").innerHTML = pairFacets();
}

function pairSelectors() {
  return `<h3>${both("Two runs, question by question", "两次运行逐题对比")}</h3><div class="tools">A <select id="first"></select> → B <select id="second"></select></div><div id="pair"></div><div id="pair-facets"></div>`;
}

function runs() {
  let html = "";
  if (R.runs) html += leaderboard();
  if (R.summary) html += spread();
  if (R.agreement) {
    const lines = Object.entries(R.agreement).map(([names, share]) => ({cells: [names.split(" | ").map(phrase).join(" | "), number(share)]}));
    html += `<h3>${both("Same readable answer in both", "两次答案相同")}</h3>` + table(["", both("% of questions", "占题数 %")], lines, {sortable: false});
  }
  if (R.pairs) html += allPairs();
  if (R.comparison) html += baselineMetrics();
  if (R.run_names.length > 1) {
    // A baseline is what the run is compared with: it stands first.
    if (R.comparison) [pair.first, pair.second] = [R.run_names.length - 1, 0];
    html += pairSelectors();
  }
  if (!html) return;
  section("runs", "Runs and tests", "多次运行与检验", html);
  for (const side of ["first", "second"]) {
    if (byId(side)) byId(side).onchange = event => { pair[side] = +event.target.value; drawPair(); };
  }
  drawPair();
}

runs();

// Accuracy by the values of each facet: bars with intervals, published numbers as marks, all numbers below.

const FEW = 12;

function publishedOf(breakdown) {
  const found = R.published && (R.published.facets || []).find(one => one.facet === breakdown.facet);
  if (!found) return {cells: {}, models: []};
  const models = [...new Set(Object.values(found.cells).flatMap(Object.keys))];
  return {...found, models: models.map((name, i) => ({name, color: PALETTE[i % PALETTE.length]}))};
}

function groupName(group) {
  const full = both(escape(group.en), escape(group.zh));
  return [group.en, group.zh].includes(group.name) ? full : `${escape(group.name)} <span class="soft">${full}</span>`;
}

function groupLabel(group) {
  return `${both(escape(group.en), escape(group.zh))} <small>n=${count(group.scores.n)}${group.small ? " *" : ""}</small>`;
}

function breakdownHtml(breakdown) {
  const published = publishedOf(breakdown);
  const marksOf = group => published.models.filter(model => (published.cells[group.name] || {})[model.name] != null)
    .map(model => ({...model, at: published.cells[group.name][model.name]}));
  const items = breakdown.cells.map(group => ({
    label: groupLabel(group), value: group.scores.accuracy, interval: group.scores.accuracy_ci, kind: group.small ? "own few" : "own",
    go: {facet: breakdown.facet, values: group.values}, marks: marksOf(group),
  }));
  const scale = scaleOf(items);
  const rest = items.length > FEW + 2 ? `<details><summary>${both(`${items.length - FEW} more`, `其余 ${items.length - FEW} 项`)}</summary>${bars(items.slice(FEW), scale)}</details>` : "";
  const entries = breakdown.cells.map(group => ({
    name: groupName(group), sort: group.name, scores: {...group.scores, ...published.cells[group.name]}, small: group.small, go: {facet: breakdown.facet, values: group.values},
  }));
  const columns = [...shownColumns.filter(key => key !== "accuracy_macro"), ...published.models.map(model => model.name)];
  const macro = breakdown.macro_accuracy != null ? `<p>${both("Mean over the groups (the paper's average)", "各类均值（论文口径）")}: <b>${breakdown.macro_accuracy.toFixed(2)}</b></p>` : "";
  const few = breakdown.cells.some(group => group.small) ? `<p class="soft">${both(`* fewer than ${breakdown.minimum} questions: read the interval, not the accuracy.`, `* 不足 ${breakdown.minimum} 题：请看区间，不要只看正确率。`)}</p>` : "";
  const source = published.source ? `<p class="soft">${both("Marks", "色标")}: ${described(published.source)}${R.published.caveat ? ` — ${both("not the same questions", "题目不同")}` : ""}</p>` : "";
  return `<h3>${both(escape(breakdown.facet), escape(breakdown.zh))} <small>${breakdown.source ? described(breakdown.source) : ""}</small></h3>
    ${legend(published.models)}${bars(rest ? items.slice(0, FEW) : items, scale)}${rest}${macro}${few}${source}
    <details><summary>${both("All numbers", "全部数值")}</summary>${scoreTable(entries, columns)}</details>`;
}

function facets() {
  if (!R.tables.length) return;
  section("facets", "By category", "按类别结果", `<p class="soft">${both(
    "Accuracy in percent with its 95% interval. Click a bar or a line to see its questions, a heading to sort.",
    "正确率（%）及 95% 区间。点击条形或行可查看题目，点击表头排序。")}</p>${R.tables.map(breakdownHtml).join("")}`);
}

facets();

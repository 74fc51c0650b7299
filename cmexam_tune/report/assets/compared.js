// The run beside other runs, guessing and published numbers.

const BASELINES = {
  uniform_subset: ["Guessing any set of letters", "随机猜任意选项组合"],
  uniform_single: ["Guessing one letter", "随机猜一个选项"],
  majority: ["Always the most frequent answer", "总选最常见的答案"],
};

function macroAccuracy() {
  const breakdown = R.tables.find(one => one.macro_accuracy != null);
  return overall.accuracy_macro ?? (breakdown && breakdown.macro_accuracy);
}

function comparedItems() {
  const published = R.published, own = R.runs ? Object.entries(R.runs) : [[R.name, overall]];
  const items = own.map(([name, scores], i) => ({
    label: phrase(name), value: scores.accuracy, interval: scores.accuracy_ci, kind: i ? "other" : "own",
  }));
  if (R.comparison && R.comparison.n) {
    const {name, scores, both: right, lost, n} = R.comparison;
    items.push({label: phrase(name), value: scores.accuracy ?? 100 * (right + lost.length) / n, interval: scores.accuracy_ci, kind: "other"});
  }
  if (published && published.metric === "accuracy_macro") {
    items.push({label: both("This run, mean of the categories", "本次模型（各大类均值）"), value: macroAccuracy(), kind: "own"});
  }
  for (const row of published ? published.rows : []) {
    items.push({label: phrase(row.name), value: row[published.metric], kind: "published", note: " †"});
  }
  for (const [key, baseline] of Object.entries(R.baselines)) {
    items.push({label: both(...BASELINES[key]), value: baseline.expected, kind: "guess"});
  }
  return items.filter(item => item.value != null).sort((a, b) => b.value - a.value);
}

function publishedNote() {
  const published = R.published;
  if (!published) return "";
  const caveat = published.caveat ? `<p class="warning">${both(`† Not the same questions: the ${escape(published.caveat)}.`, `† 题目不同：公布的数值来自论文的测试集（${count(published.n)} 题），而非本报告的 ${count(overall.n)} 道题，不能直接比较。`)}</p>` : "";
  return `${caveat}<p class="soft">† ${both("Published", "论文公布")}: ${described(published.source)}</p>`;
}

function compared() {
  const items = comparedItems();
  if (!items.length) return;
  const guess = R.baselines.uniform_subset;
  const simulated = guess && guess.mean != null ? `<p class="soft">${both(
    `Guessing any set of letters, simulated with ${guess.seeds} seeds on these questions: ${guess.mean.toFixed(2)} ± ${guess.std.toFixed(2)}%.`,
    `随机猜任意选项组合，用 ${guess.seeds} 个随机种子在这些题目上模拟：${guess.mean.toFixed(2)} ± ${guess.std.toFixed(2)}%。`)}</p>` : "";
  section("compared", "Compared", "对比", `<p class="soft">${both(
    "Accuracy in percent; the line is the 95% interval. A model that does not clearly pass the guessing bars has shown no knowledge.",
    "正确率（%），横线为 95% 区间。若不明显高于随机猜测，就不能说明模型掌握了知识。")}</p>
    ${publishedNote()}${bars(items, scaleOf(items))}${simulated}`);
}

compared();

// Accuracy by the length of the question, CMExam's Figure 3.

function lengths() {
  const bins = R.by_length.filter(bin => bin.accuracy != null);
  if (!bins.length) return;
  const items = bins.map(bin => ({
    label: `${bin.from}–${bin.to ?? ""} <small>n=${count(bin.n)}</small>`, value: bin.accuracy, interval: bin.accuracy_ci, kind: bin.small ? "own few" : "own",
  }));
  const best = R.published && R.published.lengths || [];
  const paper = best.length ? `<p class="soft">${both(
    `CMExam, Figure 3: its models were best on questions of ${best[0]} to ${best[1]} characters.`,
    `CMExam 论文图 3：各模型在 ${best[0]}–${best[1]} 字的题目上正确率较高。`)}</p>` : "";
  section("length", "By question length", "按题干长度", `<p class="soft">${both("Accuracy (%) by the number of characters of the question.", "按题干字数统计的正确率（%）。")}</p>${bars(items, scaleOf(items))}${paper}`);
}

lengths();

// The same outputs by every scoring profile, and where the points between our score and theirs come from.

const STEPS = [
  ["by_subset", both("subset", "题目范围")], ["by_reading", both("reading", "答案解析")], ["by_denominator", both("denominator", "分母")], ["by_average", both("average", "平均方式")],
];

function bridgeTable() {
  const points = value => ({html: value == null ? "–" : `<span class="${value > 0.005 ? "up" : value < -0.005 ? "down" : ""}">${signed(value, 2)}</span>`, sort: value ?? -999});
  const lines = Object.values(R.bridges).map(one => ({
    go: one.differing ? {profile: one.profile} : null,
    cells: [
      {html: escape(one.profile) + (one.mark ? ` <small title="${escape(one.mark)}">*</small>` : "") + (one.subset === "all questions" ? "" : ` <small>${phrase(one.subset)}</small>`), sort: one.profile},
      {html: number(one.standard, "", 2), sort: sortKey(one.standard)}, ...STEPS.map(([key]) => points(one[key])),
      {html: `<b>${number(one.theirs, "", 2)}</b>`, sort: sortKey(one.theirs)}, {html: count(one.differing), sort: one.differing},
    ],
  }));
  const head = ["", both("standard", "本报告"), ...STEPS.map(([, name]) => name), both("theirs", "该规则"), both("read differently", "解析不同")];
  const mark = Object.values(R.bridges).some(one => one.mark) ? `<p class="soft">${both("* The run was asked in other words than this script asks in.", "* 本次运行的提示语与该脚本不同。")}</p>` : "";
  const none = Object.values(R.bridges).some(one => one.theirs == null) ? `<p class="soft">${both("–: none of these questions counts there.", "–：这些题目都不计入该规则。")}</p>` : "";
  return table(head, lines, {wide: [1, 2, 3, 4, 5]}) + mark + none;
}

function profiles() {
  if (!R.bridges) return;
  const entries = Object.entries(R.profiles || {}).map(([name, scores]) => ({name: escape(name), scores}));
  section("profiles", "Scoring profiles", "评分规则", `<p class="soft">${both(
    "The same outputs, read and counted as published scripts do: from our accuracy, by four steps in points of percent, to theirs. Click a line to see the questions that are read differently.",
    "同一批输出按各公开脚本解析、计分：从本报告的正确率出发，经四步（百分点）得到该脚本的分数。点击一行可查看解析结果不同的题目。")}</p>
    ${bridgeTable()}<details ${entries.length ? "" : "hidden"}><summary>${both("All scores", "全部分数")}</summary>${scoreTable(entries)}</details>`);
}

profiles();

// How each number was computed and where it comes from.

function method() {
  const lines = Object.entries(R.signature).map(([key, value]) => ({cells: [heading(key), `<code>${escape(typeof value === "string" ? value : JSON.stringify(value))}</code>`]}));
  section("method", "Method", "计算方式", `<p class="soft">${both("Two numbers can be compared only if their signatures are equal.", "签名相同的数值才可比较。")}</p>
    <div class="signatures">${table([both("number", "指标"), both("signature", "签名")], lines, {sortable: false})}</div>
    <details><summary>${both("Files, versions and settings", "文件、版本与设置")}</summary><pre class="provenance">${escape(JSON.stringify(R.provenance, null, 2))}</pre></details>`);
}

method();

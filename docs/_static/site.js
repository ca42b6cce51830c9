// What the theme leaves out for people who use a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const wide of document.querySelectorAll("pre, .table-wrapper, .drawing")) wide.tabIndex = 0;
  for (const [part, label] of [[".sidebar-drawer", "All pages"], [".toc-drawer", "On this page"]])
    document.querySelector(part)?.setAttribute("aria-label", label);
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("th")].map((head) => head.textContent);
    for (const cell of table.querySelectorAll("td")) if (heads[cell.cellIndex]) cell.dataset.head = heads[cell.cellIndex];
  }
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
});

// What the search says, in a sentence, in the language of the page.
if (typeof Documentation !== "undefined") {
  const chinese = document.documentElement.lang.startsWith("zh");
  const none = "Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories.";
  const found = "Search finished, found one page matching the search query.";
  Documentation.addTranslations(
    chinese
      ? {
          locale: "zh", plural_expr: "0",
          messages: { Searching: "搜索中", "Search Results": "搜索结果", [none]: "没有页面包含这些词，请换一个词试试。", [found]: ["找到 ${resultCount} 个页面。"] },
        }
      : { locale: "en", plural_expr: "n == 1 ? 0 : 1", messages: { [none]: "No page has all of these words: try fewer or other ones." } },
  );
  if (chinese)
    document.addEventListener("DOMContentLoaded", () => {
      for (const field of document.querySelectorAll(".sidebar-search")) field.placeholder = field.ariaLabel = "搜索";
    });
}

// What the theme leaves out for people who use a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const wide of document.querySelectorAll("pre, .table-wrapper, .drawing")) wide.tabIndex = 0;
  for (const [part, label] of [[".sidebar-drawer", "All pages"], [".toc-drawer", "On this page"]])
    document.querySelector(part)?.setAttribute("aria-label", label);
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
});

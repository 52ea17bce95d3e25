"use strict";
/* Add what the theme leaves out for screen readers and keyboards. */
document.addEventListener("DOMContentLoaded", () => {
  const set = (selector, name, value) => document.querySelectorAll(selector).forEach((node) => node.setAttribute(name, value));
  set(".sidebar-drawer", "aria-label", "All pages");
  set(".toc-drawer", "aria-label", "This page");
  set("[role=heading]:not([aria-level])", "aria-level", "2");
  set("dt.sig dl", "role", "presentation"); // the lines of a signature
  const findScrolling = () => document.querySelectorAll("article pre, .table-wrapper, div.math").forEach((node) => {
    if (node.scrollWidth > node.clientWidth) node.tabIndex = 0; // so that the arrow keys scroll it
    else node.removeAttribute("tabindex");
  });
  findScrolling();
  addEventListener("resize", findScrolling);
});

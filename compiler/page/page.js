// Without this script a click still works: links lead to the sections, and :target shows them.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const narrow = () => matchMedia("(max-width: 1000px)").matches;
  function show(id, scroll) {
    const detail = document.getElementById(id);
    if (!detail || !detail.classList.contains("detail")) return false;
    const graph = detail.closest(".graph");
    graph.querySelectorAll(".detail.shown").forEach((d) => d.classList.remove("shown"));
    graph.querySelectorAll(".chosen").forEach((n) => { n.classList.remove("chosen"); n.removeAttribute("aria-current"); });
    detail.classList.add("shown");
    const names = new Set();
    graph.querySelectorAll("a.node").forEach((n) => {
      if (n.dataset.shows === id) { n.classList.add("chosen"); n.setAttribute("aria-current", "true"); names.add(n.dataset.name); }
    });
    graph.querySelectorAll(".edge").forEach((e) => e.classList.toggle("lit", names.has(e.dataset.from) || names.has(e.dataset.to)));
    detail.closest(".panel").scrollTop = 0;
    if (scroll && narrow()) detail.scrollIntoView({ behavior: "smooth", block: "start" });
    return true;
  }
  document.addEventListener("click", (event) => {
    const node = event.target.closest("a.node");
    if (!node) return;
    if (show(node.dataset.shows, true)) { event.preventDefault(); history.replaceState(null, "", "#" + node.dataset.shows); }
  });
  addEventListener("hashchange", () => show(decodeURIComponent(location.hash.slice(1)), true));
  if (!show(decodeURIComponent(location.hash.slice(1)), false) && !narrow()) {
    const first = document.querySelector(".detail");
    if (first) { const heaviest = document.querySelector(".detail[id*=linear]") || first; show(heaviest.id, false); }
  }
})();

// The board's filters: what is chosen stands in the address after #, so that a view can be sent and the back button works.
(() => {
  const form = document.querySelector("form.filter"), lists = [...document.querySelectorAll("ul.board")];
  const lines = [...document.querySelectorAll("ul.board > li")], told = document.getElementById("told");
  const counts = [...document.querySelectorAll(".counts button")], keys = ["q", "verdict", "device", "family", "source", "sort"];
  lines.forEach((line, i) => { line.dataset.order = i; line.dataset.text = (line.textContent + " " + line.dataset.words).toLowerCase(); });
  form.hidden = false;
  counts.forEach((button) => { button.disabled = false; });
  const orders = {
    "": (a, b) => a.dataset.order - b.dataset.order,
    closest: (a, b) => near(a) - near(b) || a.dataset.order - b.dataset.order,
    largest: (a, b) => size(b) - size(a) || a.dataset.order - b.dataset.order,
    newest: (a, b) => b.dataset.when.localeCompare(a.dataset.when) || a.dataset.order - b.dataset.order,
    verdict: (a, b) => a.dataset.verdict.localeCompare(b.dataset.verdict) || a.dataset.order - b.dataset.order,
  };
  const near = (line) => line.dataset.margin === "" ? Infinity : +line.dataset.margin;
  const size = (line) => line.dataset.effect === "" ? -1 : +line.dataset.effect;
  const read = () => new URLSearchParams(location.hash.slice(1));
  const show = () => {
    const asked = read(), words = (asked.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    keys.forEach((key) => { if (form.elements[key].value !== (asked.get(key) || "")) form.elements[key].value = asked.get(key) || ""; });
    counts.forEach((b) => b.setAttribute("aria-pressed", String((asked.get(b.dataset.key) || "") === b.dataset.value)));
    let seen = 0;
    lines.forEach((line) => {
      const fits = ["verdict", "device", "family", "source"].every((key) => !asked.get(key) || line.dataset[key] === asked.get(key));
      line.hidden = !(fits && words.every((word) => line.dataset.text.includes(word)));
      seen += !line.hidden;
    });
    const order = orders[asked.get("sort") || ""] || orders[""];
    lists.forEach((list) => {
      [...list.children].sort(order).forEach((line) => list.append(line));
      list.closest("section").hidden = ![...list.children].some((line) => !line.hidden);
    });
    told.textContent = seen === lines.length ? `${seen} lines` : `${seen} of ${lines.length} lines`;
  };
  const write = (changes) => {
    const asked = read();
    for (const [key, value] of Object.entries(changes)) value ? asked.set(key, value) : asked.delete(key);
    const hash = asked.toString();
    history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
    show();
  };
  form.addEventListener("input", (event) => write({ [event.target.name]: event.target.value }));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => write(Object.fromEntries(keys.map((key) => [key, ""]))));
  counts.forEach((button) => button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") === "true";
    write({ [button.dataset.key]: on ? "" : button.dataset.value });
  }));
  addEventListener("hashchange", show);
  show();
})();

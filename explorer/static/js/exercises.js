// Exercises: what was typed becomes a file for the lecturer. Nothing is sent.

const form = /** @type {HTMLFormElement} */ (document.getElementById("answers"));
const who = /** @type {HTMLInputElement} */ (document.getElementById("who"));
const saved = document.getElementById("saved");

form.addEventListener("submit", (e) => e.preventDefault());
document.getElementById("save")?.addEventListener("click", () => {
  const answers = Object.fromEntries([...new FormData(form)].filter(([, text]) => text !== ""));
  const file = new Blob([JSON.stringify({ name: who.value, answers }, null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `answers-${who.value.trim().replace(/[^\w-]+/g, "-") || "anonymous"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
  if (saved) saved.textContent = `${Object.keys(answers).length} answers saved as ${link.download}`;
});

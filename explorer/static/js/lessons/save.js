// A text as a file of the reader's.

/**
 * @param {string} text
 * @param {string} type
 * @param {string} name
 */
export function save(text, type, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

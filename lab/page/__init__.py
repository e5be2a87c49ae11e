"""SVG drawings and Markdown tables of README.md and the documents, made from recorded rows."""

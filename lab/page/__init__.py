"""The report that people look at: one HTML page, PNG plots and Markdown tables from result rows."""

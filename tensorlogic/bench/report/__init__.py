"""What a result file says: tables, plots, opportunities, as HTML, Markdown and text."""

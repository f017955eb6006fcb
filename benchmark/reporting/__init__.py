"""The rooms of report.py: runs, what others reported, scores, tables, figures, the document."""

"""The report: tables, one HTML page, curves, maps of documents."""

"""The report: tables, one HTML page, curves, maps of documents."""


def __getattr__(name):
    if name in ("plot", "terminal_table", "write_report"):  # where 0.1.0 had them
        from hf_axonn_eval.report import write

        return getattr(write, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

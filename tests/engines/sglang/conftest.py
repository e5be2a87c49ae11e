import importlib.util

if importlib.util.find_spec("sglang") is not None:
    import absent_libraries

    absent_libraries.install()

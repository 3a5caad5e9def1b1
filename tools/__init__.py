"""Programs for the developers of Ebbtide. Nothing here is installed."""

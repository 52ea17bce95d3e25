"""Everything that a person sees: tables, plots, reports. Reads results, never torch."""

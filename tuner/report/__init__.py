"""Tables, plots and pages from the results."""

"""Results: runs, trials and winners in SQL."""

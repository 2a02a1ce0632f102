"""Searches: many runs, called trials, on Ray Tune. Any run becomes one by adding `search=`."""

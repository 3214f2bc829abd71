"""Parts of a scenario, often in files of their own: clusters, graphs, models, plans, schedules; and remarks on them."""

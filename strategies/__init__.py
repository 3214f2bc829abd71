"""Plans, schedules, shardings, their lowering to programs, their cost, and the search over them."""

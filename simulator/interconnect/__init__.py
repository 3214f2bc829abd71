"""Links between devices, and the routes over them."""

"""A report as one HTML file that needs no network: numbers in, a page that zooms out."""

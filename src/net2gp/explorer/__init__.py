"""A page to play with: networks of any width as Gaussian processes, in a browser, offline."""

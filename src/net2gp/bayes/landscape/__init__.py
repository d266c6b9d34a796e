"""What the loss of a network looks like around and between its minima: numbers in, figures' values out."""

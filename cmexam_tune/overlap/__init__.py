"""Questions that occur more than once, in one file or in several."""

"""Part: prefixes from whichever engine has them, by keys that name a prefix by its contents."""

// Nothing of its own: the first user of the precompiled Catch2 header that every test program shares.

"""The benchmarks of `headrace bench`. They run the real code on artificial work, so that runs differ only in speed."""

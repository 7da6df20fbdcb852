"""`python -m t2lens.cli`"""

from t2lens.cli import main

main()

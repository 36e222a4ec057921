from weft.cli.app import main

main()

"""The words that `chat_prompts` puts into its templates, a list a kind."""

from __future__ import annotations


def _split(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


LISTS: dict[str, list[str]] = {
    "thing": _split(
        """
        a lost umbrella; an old lighthouse; a talking fox; a broken clock; a paper boat; a
        forgotten library; the last train home; a robot who loves gardening; a magic pencil; a
        stray dog; an empty theatre; a letter that arrives too late; a hidden door; a snow
        globe; a lonely astronaut; a brave mouse; a red bicycle; a violin without strings; a
        secret recipe; a storm at sea; friendship; courage; the smell of bread; a midnight phone
        call; a map with no names; a pocket watch; two rival bakers; a dragon who is afraid of
        fire; a wishing well; an abandoned space station; a village without clocks; a cat that
        can read; the first snow; a river that remembers; a mysterious package; a kite; a
        painting that changes every night
        """
    ),
    "place": _split(
        """
        a small fishing village; a crowded market; a desert town; the bottom of the sea; a
        mountain cabin; an old castle; a busy airport; a quiet library; a city in the clouds; a
        tropical island; a snowy forest; an underground station; a farm in spring; a harbour; a
        research base in Antarctica; a colony on Mars; a medieval town; a school on a hill; a
        jazz club; a night train; a botanical garden; a hospital; a deserted beach; a theatre
        """
    ),
    "activity": _split(
        """
        gardening; learning a new language; yoga; painting with watercolours; running; reading
        every day; playing chess; meditation; cooking at home; hiking; swimming; photography;
        keeping a diary; volunteering; cycling to work; playing the guitar; knitting;
        birdwatching; public speaking; working from home; travelling alone; camping; dancing;
        learning to code; saving money; fishing; pottery; singing in a choir; board games; rock
        climbing; baking bread; woodworking; astronomy; journaling; walking a dog
        """
    ),
    "genre": _split(
        """
        science fiction; mystery; romance; fantasy; horror; historical; adventure; comedy;
        detective; western; dystopian; coming-of-age; thriller; fairy-tale
        """
    ),
    "audience": _split(
        """
        a five-year-old child; a high school student; my grandmother; a beginner; a busy
        manager; a group of tourists; a family with two children; someone new to the topic; a
        ten-year-old; a college student; a curious teenager; a retired couple; a non-native
        speaker; a team of engineers; a nurse; a young athlete
        """
    ),
    "product": _split(
        """
        a wireless headphone; a solar-powered lamp; a folding bicycle; a smart watch; an
        electric kettle; a noise-free keyboard; a backpack for students; a garden robot; a water
        bottle that tracks how much you drink; a standing desk; an air fryer; a sleeping bag; a
        cheap laptop; a robot vacuum cleaner; handmade soap; a camera drone; running shoes; an
        e-book reader; a coffee machine; a board game; an electric car; a language app; a
        digital thermometer; a portable projector; a raincoat made of recycled plastic
        """
    ),
    "person": _split(
        """
        a firefighter; a retired sailor; a nurse; a software engineer; a chef; a history
        teacher; a pirate; a gardener; a pilot; a doctor; a wizard; a taxi driver; a journalist;
        a musician; a librarian; a farmer; an architect; a judge; a carpenter; a marine
        biologist; a personal trainer; a shop assistant; an accountant; a photographer; a
        detective; a queen; a mechanic; a data scientist; a translator; an electrician; a poet;
        a project manager; a kindergarten teacher; a physicist; a tour guide; a baker
        """
    ),
    "subject": _split(
        """
        social media; artificial intelligence; free public transport; homework; remote work;
        electric cars; video games; space travel; nuclear energy; school uniforms; a four-day
        working week; online shopping; vegetarian food; zoos; self-driving cars; universal basic
        income; learning history; city parks; plastic bags; mobile phones in class; genetic
        engineering; renewable energy; advertising to children; working at night; tourism;
        animal testing; early retirement; facial recognition; robots in hospitals; fast fashion
        """
    ),
    "occasion": _split(
        """
        a birthday party for a friend; a school reunion; a wedding; a team meeting; a charity
        run; the opening of a bakery; a farewell party; a science fair; a housewarming; a
        graduation; a book club evening; a company anniversary; a garden party; a concert; a
        surprise party; a family picnic; a job interview; a neighbourhood festival; a product
        launch; a fundraising dinner; a rainy weekend; a first date; a game night
        """
    ),
    "recipient": _split(
        """
        my manager; a customer; my landlord; a professor; a colleague; my neighbour; the school
        principal; an old friend; the support team; a hotel; my team; a supplier; the human
        resources department; a future employer; my aunt; the city council; my doctor; a job
        applicant; the bank; a conference organiser
        """
    ),
    "matter": _split(
        """
        a delayed delivery; a change of schedule; a missing invoice; the noise at night; a
        project deadline; a day off next week; a broken heater; the budget for next year; moving
        to a new city; changing careers; a difficult exam; a disagreement with a friend; a new
        puppy; the results of a survey; a lost parcel; a salary raise; the summer holidays; a
        presentation tomorrow; learning to drive; a new website; choosing a university; a
        meeting on Friday; sleeping badly; an unpaid bill; a software update
        """
    ),
    "favour": _split(
        """
        a recommendation letter; feedback on a draft; a refund; more time; an appointment; a
        copy of the report; help with moving; a price list; advice on a career; the minutes of
        the meeting; a replacement; directions; access to the shared folder; a reference; a
        quote for printing; their opinion on a new logo; volunteers; sponsorship
        """
    ),
    "mishap": _split(
        """
        a missed meeting; a late reply; a wrong order; a broken vase; a cancelled event; a
        stolen painting; a typing error in a contract; a double booking; the loud music; a lost
        key; a spilled coffee; forgetting a birthday; an incorrect invoice; a flooded kitchen; a
        vanished cake; a damaged parcel; an outage of the website; a missing cat
        """
    ),
    "science": _split(
        """
        gravity; photosynthesis; black holes; evolution; DNA; magnetism; plate tectonics; the
        water cycle; vaccines; quantum mechanics; the greenhouse effect; electricity; atoms;
        sound waves; natural selection; the immune system; relativity; chemical bonds; entropy;
        the periodic table; cell division; light refraction; nuclear fusion; fermentation;
        friction; neurons; osmosis; tides; radioactivity; antibiotics; prime numbers;
        probability; statistics; the Pythagorean theorem; derivatives; binary numbers;
        ecosystems; the carbon cycle; enzymes; superconductivity; buoyancy; the solar system;
        volcanoes; genes; bacteria; viruses; acids
        """
    ),
    "device": _split(
        """
        a refrigerator; a microwave; a telescope; a battery; a bicycle; a touch screen; a
        camera; an airplane wing; a solar panel; a compass; a washing machine; a hybrid car; a
        wind turbine; the telephone; the printing press; a thermometer; a steam engine; radio; a
        3D printer; a submarine; a hearing aid; a microscope; a light bulb; an elevator; a
        rocket; noise-cancelling headphones; a bar code scanner; GPS; a piano; a heat pump; a
        parachute
        """
    ),
    "why": _split(
        """
        is the sky blue; do leaves change colour in autumn; do cats purr; is the sea salty; do
        we dream; does bread rise; do we yawn; is ice slippery; do birds migrate; do we need
        sleep; does metal feel colder than wood; do stars twinkle; does a boat float; do onions
        make us cry; is exercise good for the heart; do prices go up; do we have leap years;
        does the moon change its shape; do languages change; is biodiversity important; do
        people procrastinate; do time zones matter; do earthquakes happen; do some people like
        spicy food
        """
    ),
    "computing": _split(
        """
        recursion; a hash table; an API; machine learning; a neural network; object-oriented
        programming; a linked list; version control; a database index; encryption; cloud
        computing; a compiler; unit testing; a stack and a queue; multithreading; a web server;
        binary search; dynamic programming; an operating system; a firewall; garbage collection;
        a decision tree; big data; a blockchain; caching; inheritance; a for loop; a pointer; a
        Docker container; DNS; a REST service; overfitting; a regular expression; JSON
        """
    ),
    "history": _split(
        """
        the French Revolution; the fall of the Roman Empire; the invention of printing; the
        Industrial Revolution; the First World War; the moon landing; the Silk Road; the
        Renaissance; the Black Death; the Great Depression; the Cold War; the building of the
        pyramids; the fall of the Berlin Wall; the American Civil War; the discovery of
        penicillin; the Age of Exploration; the Ottoman Empire; the women's suffrage movement;
        the Vikings; the Second World War; ancient Greek democracy; the Mongol Empire; the
        Enlightenment; the end of apartheid; the Meiji Restoration; the Gold Rush; the Russian
        Revolution
        """
    ),
    "economics": _split(
        """
        inflation; supply and demand; interest rates; a recession; taxes; unemployment;
        opportunity cost; a monopoly; exchange rates; insurance; compound interest; public debt;
        free trade; a stock market; a budget deficit; minimum wage; tariffs; GDP; subsidies
        """
    ),
    "task": _split(
        """
        bake bread; change a flat tyre; write a resume; grow tomatoes; learn to swim; train for
        a marathon; paint a room; remove a coffee stain; save money; fix a leaking tap; plan a
        vegetable garden; prepare for an exam; make pancakes; build a bookshelf; tie a tie;
        meditate; brew good coffee; set up a home office; sleep better; train a puppy; make a
        website; start a podcast; clean a keyboard; write a business plan; cook rice; learn the
        piano; take better photos; prepare a presentation; organise a wardrobe; reduce food
        waste; speak in public; make friends in a new city; negotiate a salary; iron a shirt;
        draw a face; back up a computer; stop biting nails; keep houseplants alive; improve
        handwriting; prepare for a job interview; create a strong password; plant a tree; lose
        weight safely; read more books; learn Spanish; assemble a bicycle; make soap; write a
        song; recycle
        """
    ),
    "country": _split(
        """
        Japan; Italy; Brazil; Canada; Egypt; India; Mexico; Norway; Kenya; Australia; Portugal;
        Greece; Thailand; Peru; Germany; Morocco; Iceland; Vietnam; Spain; Turkey; France; South
        Korea; Argentina; Poland; New Zealand; Switzerland; Indonesia; Ireland; Chile; Sweden;
        China; South Africa; Hungary; Austria; Finland; Nigeria; Scotland; Cuba; Nepal; Ukraine
        """
    ),
    "business": _split(
        """
        a small bakery; a dog-walking service; a bookshop with a cafe; a cleaning company; a
        mobile game studio; a flower shop; an online tutoring platform; a bicycle repair shop; a
        food truck; a yoga studio; a travel agency; a podcast about history; a toy store; a
        craft beer brand; a coffee shop; a photography studio; a vegan restaurant; a gym
        """
    ),
    "food": _split(
        """
        lentils; chicken; rice; potatoes; tomatoes; eggs; chocolate; mushrooms; salmon; pasta;
        cheese; apples; beans; spinach; tofu; pumpkin; yoghurt; bread; bananas; carrots; sushi;
        honey; coffee; tea; olive oil; oats; avocado; peanuts; corn; garlic; hummus; lemons
        """
    ),
    "program": _split(
        """
        reverses a string; checks whether a number is prime; sorts a list of numbers; counts the
        words in a text; finds the largest number in a list; converts Celsius to Fahrenheit;
        removes duplicates from a list; checks whether a word is a palindrome; computes a
        factorial; prints the Fibonacci sequence; reads a file line by line; merges two sorted
        lists; counts the vowels in a string; finds the second largest value; adds two matrices;
        checks whether two words are anagrams; generates a random password; validates an email
        address; computes the average of a list; rotates a list by k places; finds common
        elements of two lists; groups words by their first letter; flattens a nested list; finds
        the longest word; converts a number to binary; computes the greatest common divisor;
        implements a queue; plays rock, paper, scissors; draws a triangle of stars; sums the
        digits of a number; searches a sorted list; counts how often each letter occurs; parses
        a date; splits a bill among friends; simulates a dice roll; keeps a to-do list
        """
    ),
    "program2": _split(
        """
        sort a list of names; read a CSV file; download a page; compute an average; find the
        maximum; parse a date; count words; print a table; merge two lists; send an email
        """
    ),
    "language": _split(
        """
        Python; JavaScript; Java; C; C++; Go; Rust; Ruby; TypeScript; Bash; Python; Python;
        JavaScript; Java
        """
    ),
    "query": _split(
        """
        the ten best customers by revenue; all orders without a payment; employees who earn more
        than their manager; the average price per category; duplicate email addresses; the
        newest post of each user; products that were never sold; the total sales per month;
        students with more than three courses; all books by one author; the second highest
        salary
        """
    ),
    "pattern": _split(
        """
        a phone number; a date like 2024-05-01; an email address; a hexadecimal colour; a time
        of day; a postal code; an IP address; a word in quotes; a price in dollars; a URL
        """
    ),
    "algorithm": _split(
        """
        binary search; bubble sort; merge sort; quicksort; breadth-first search; insertion in a
        linked list; depth-first search; the sieve of Eratosthenes; linear search; Dijkstra's
        algorithm; a hash table lookup; matrix multiplication; selection sort
        """
    ),
    "name": _split(
        """
        Anna; Ben; Carla; David; Elena; Farid; Grace; Hiro; Ivan; Julia; Kofi; Laura; Mei; Nora;
        Omar; Paula; Quentin; Rosa; Sam; Tara; Uma; Victor; Wendy; Yusuf; Zoe
        """
    ),
    "items": _split(
        """
        apples; books; marbles; stickers; pencils; coins; cookies; balloons; stamps; shells;
        cards; oranges; toy cars; flowers; tickets; candles; buttons; eggs; chairs
        """
    ),
    "nature": _split(
        """
        a river; the ocean; an old oak tree; a rainforest; a coral reef; a glacier; the moon; a
        volcano; a swamp; a meadow; the wind; a thunderstorm; a desert; a lake; the Arctic; a
        mountain; a honeybee; a whale; an ant colony; a wolf; a cloud; autumn leaves; the sun; a
        mangrove forest; a waterfall; the savanna; a migrating goose; a mushroom; a sunflower
        """
    ),
    "phrase": _split(
        """
        I am very tired; that is a great idea; I do not understand; let us meet tomorrow; it was
        nice to see you; please be careful; the food was excellent; I changed my mind; thank you
        for your help; we need more time; this is too expensive; good luck; I am sorry
        """
    ),
    "adjective": _split(
        """
        brave; fragile; ambiguous; generous; meticulous; ancient; humble; vivid; eager;
        reluctant; abundant; scarce; resilient; curious; obsolete; candid; serene; stubborn;
        subtle; diligent; gloomy; concise; authentic; rigid; gentle; famous; elegant;
        spontaneous; tedious
        """
    ),
    "review": _split(
        """
        The room was clean, but the staff ignored us and breakfast was cold.; I love this lamp,
        it is bright and it arrived a day early!; The film was fine, though far too long.;
        Honestly, this is the worst phone that I ever owned.; hey, can u send me the file asap?
        thx; The course was well structured and the teacher answered every question.; Your
        service is a joke, I waited two hours and nobody came.; The soup was okay, nothing
        special.; we gotta talk about the budget, it's a mess; I can't make it tonight,
        something came up.; Best concert of my life, the band played every song that I hoped
        for.; The app crashes whenever I open the map, and support never replied.; This book
        made me laugh and cry, and the ending is perfect.; Not bad for the price, but it
        scratches.; The hike was exhausting and it rained, yet the view was worth every step.;
        I'm quitting, this job is driving me crazy.; The new office is bright, quiet and close
        to home.
        """
    ),
    "broken": _split(
        """
        she go to school every day and dont like it; their are many reason why peoples travel;
        me and him was late becuase the bus dont come; i has three cat and they is very
        playfull; The childrens plays in the garden while it rain; Yesterday I go to the shop
        and buyed milk; he dont know nothing about the meeting; Its a beautifull day and the
        birds is singing; We was happy too see you're new house; Everyone have they own opinion
        about this movie; The manager ask the team for finish the report; I am live in this city
        since ten years
        """
    ),
    "passage": _split(
        """
        Maria Santos opened her bakery in Lisbon in March 2015. Within two years she sold 400
        loaves a day and hired six people. She now plans a second shop near the river.; Bees
        visit up to five thousand flowers a day. While they gather nectar they carry pollen from
        plant to plant, and about a third of our food depends on that work. Pesticides and the
        loss of meadows have made their numbers fall in many countries.; The town council
        decided on Monday to close the main street to cars for the summer. Shop owners fear
        fewer customers, while parents welcome the safer way to school. A final vote is due in
        October.; Tom moved from Chicago to Denver on 3 June to work for a solar company. He
        misses the lake, but he enjoys the mountains and has already joined a climbing club.;
        Sleep has several stages. During deep sleep the body repairs tissue, and during dream
        sleep the brain sorts memories. Adults who sleep less than six hours for weeks react
        more slowly and catch colds more often.; The company earned 12 million dollars in 2021,
        3 million more than the year before. Most of the growth came from its online shop, which
        now makes up 60 percent of sales.; A storm hit the coast on Tuesday night. Winds of 120
        kilometres an hour took down power lines, and 8,000 homes were without electricity until
        the morning. No one was injured.; The old bridge was built in 1889 by the engineer Clara
        Hoffmann. It carried trains for seventy years before it became a path for walkers and
        cyclists.; Dear all, the meeting on Thursday moves to 3 pm in room 204, because Mr.
        Okafor arrives late from Lagos. Please bring the sales figures and a short list of open
        questions.; Rice was first grown in the valley of the Yangtze some nine thousand years
        ago. From there it spread to India and later to Europe. Today it feeds more than half of
        the people on Earth.; Our library lends more than books. Members can borrow drills,
        sewing machines and even a tent for two weeks. The most popular item last year was a
        telescope, with 85 loans.; Batteries store energy in chemical form. When a device is
        switched on, ions move from one side to the other and electrons flow through the
        circuit. Charging reverses the process.; Aisha, who is 34, trained as a nurse in
        Manchester and now teaches first aid in villages in Ghana. Since 2018 she has taught
        1,200 people, many of whom now teach others.; Coral reefs cover less than one percent of
        the sea floor, yet a quarter of all sea animals live there. Warm water makes corals lose
        the algae that feed them, and they turn white.; The museum shows 150 photographs by Erik
        Lund until 15 January. He walked along the Norwegian coast for a year and took one
        picture every day at noon. Admission is free on Sundays.
        """
    ),
}

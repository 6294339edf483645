"""The words that `chat_prompts` puts into its templates, a list a kind."""

from __future__ import annotations


def split_words(text: str) -> list[str]:
    """The parts of `text` between semicolons."""
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


LISTS: dict[str, list[str]] = {
    "thing": split_words(
        """
        a lost umbrella; an old lighthouse; a talking fox; a broken clock; a paper boat; a forgotten
        library; the last train home; a robot who loves gardening; a magic pencil; a stray dog; an
        empty theatre; a letter that arrives too late; a hidden door; a snow globe; a lonely
        astronaut; a brave mouse; a red bicycle; a violin without strings; a secret recipe; a storm
        at sea; friendship; courage; the smell of bread; a midnight phone call; a map with no names;
        a pocket watch; two rival bakers; a dragon who is afraid of fire; a wishing well; an
        abandoned space station; a village without clocks; a cat that can read; the first snow; a
        river that remembers; a mysterious package; a kite; a painting that changes every night
        """
    ),
    "place": split_words(
        """
        a small fishing village; a crowded market; a desert town; the bottom of the sea; a mountain
        cabin; an old castle; a busy airport; a quiet library; a city in the clouds; a tropical
        island; a snowy forest; an underground station; a farm in spring; a harbour; a research base
        in Antarctica; a colony on Mars; a medieval town; a school on a hill; a jazz club; a night
        train; a botanical garden; a hospital; a deserted beach; a theatre
        """
    ),
    "activity": split_words(
        """
        gardening; learning a new language; yoga; painting with watercolours; running; reading every
        day; playing chess; meditation; cooking at home; hiking; swimming; photography; keeping a
        diary; volunteering; cycling to work; playing the guitar; knitting; birdwatching; public
        speaking; working from home; travelling alone; camping; dancing; learning to code; saving
        money; fishing; pottery; singing in a choir; board games; rock climbing; baking bread;
        woodworking; astronomy; journaling; walking a dog
        """
    ),
    "genre": split_words(
        """
        science fiction; mystery; romance; fantasy; horror; historical; adventure; comedy;
        detective; western; dystopian; coming-of-age; thriller; fairy-tale
        """
    ),
    "audience": split_words(
        """
        a five-year-old child; a high school student; my grandmother; a beginner; a busy manager; a
        group of tourists; a family with two children; someone new to the topic; a ten-year-old; a
        college student; a curious teenager; a retired couple; a non-native speaker; a team of
        engineers; a nurse; a young athlete
        """
    ),
    "product": split_words(
        """
        a wireless headphone; a solar-powered lamp; a folding bicycle; a smart watch; an electric
        kettle; a noise-free keyboard; a backpack for students; a garden robot; a water bottle that
        tracks how much you drink; a standing desk; an air fryer; a sleeping bag; a cheap laptop; a
        robot vacuum cleaner; handmade soap; a camera drone; running shoes; an e-book reader; a
        coffee machine; a board game; an electric car; a language app; a digital thermometer; a
        portable projector; a raincoat made of recycled plastic
        """
    ),
    "person": split_words(
        """
        a firefighter; a retired sailor; a nurse; a software engineer; a chef; a history teacher; a
        pirate; a gardener; a pilot; a doctor; a wizard; a taxi driver; a journalist; a musician; a
        librarian; a farmer; an architect; a judge; a carpenter; a marine biologist; a personal
        trainer; a shop assistant; an accountant; a photographer; a detective; a queen; a mechanic;
        a data scientist; a translator; an electrician; a poet; a project manager; a kindergarten
        teacher; a physicist; a tour guide; a baker
        """
    ),
    "subject": split_words(
        """
        social media; artificial intelligence; free public transport; homework; remote work;
        electric cars; video games; space travel; nuclear energy; school uniforms; a four-day
        working week; online shopping; vegetarian food; zoos; self-driving cars; universal basic
        income; learning history; city parks; plastic bags; mobile phones in class; genetic
        engineering; renewable energy; advertising to children; working at night; tourism; animal
        testing; early retirement; facial recognition; robots in hospitals; fast fashion
        """
    ),
    "occasion": split_words(
        """
        a birthday party for a friend; a school reunion; a wedding; a team meeting; a charity run;
        the opening of a bakery; a farewell party; a science fair; a housewarming; a graduation; a
        book club evening; a company anniversary; a garden party; a concert; a surprise party; a
        family picnic; a job interview; a neighbourhood festival; a product launch; a fundraising
        dinner; a rainy weekend; a first date; a game night
        """
    ),
    "recipient": split_words(
        """
        my manager; a customer; my landlord; a professor; a colleague; my neighbour; the school
        principal; an old friend; the support team; a hotel; my team; a supplier; the human
        resources department; a future employer; my aunt; the city council; my doctor; a job
        applicant; the bank; a conference organiser
        """
    ),
    "matter": split_words(
        """
        a delayed delivery; a change of schedule; a missing invoice; the noise at night; a project
        deadline; a day off next week; a broken heater; the budget for next year; moving to a new
        city; changing careers; a difficult exam; a disagreement with a friend; a new puppy; the
        results of a survey; a lost parcel; a salary raise; the summer holidays; a presentation
        tomorrow; learning to drive; a new website; choosing a university; a meeting on Friday;
        sleeping badly; an unpaid bill; a software update
        """
    ),
    "favour": split_words(
        """
        a recommendation letter; feedback on a draft; a refund; more time; an appointment; a copy of
        the report; help with moving; a price list; advice on a career; the minutes of the meeting;
        a replacement; directions; access to the shared folder; a reference; a quote for printing;
        their opinion on a new logo; volunteers; sponsorship
        """
    ),
    "mishap": split_words(
        """
        a missed meeting; a late reply; a wrong order; a broken vase; a cancelled event; a stolen
        painting; a typing error in a contract; a double booking; the loud music; a lost key; a
        spilled coffee; forgetting a birthday; an incorrect invoice; a flooded kitchen; a vanished
        cake; a damaged parcel; an outage of the website; a missing cat
        """
    ),
    "science": split_words(
        """
        gravity; photosynthesis; black holes; evolution; DNA; magnetism; plate tectonics; the water
        cycle; vaccines; quantum mechanics; the greenhouse effect; electricity; atoms; sound waves;
        natural selection; the immune system; relativity; chemical bonds; entropy; the periodic
        table; cell division; light refraction; nuclear fusion; fermentation; friction; neurons;
        osmosis; tides; radioactivity; antibiotics; prime numbers; probability; statistics; the
        Pythagorean theorem; derivatives; binary numbers; ecosystems; the carbon cycle; enzymes;
        superconductivity; buoyancy; the solar system; volcanoes; genes; bacteria; viruses; acids
        """
    ),
    "device": split_words(
        """
        a refrigerator; a microwave; a telescope; a battery; a bicycle; a touch screen; a camera; an
        airplane wing; a solar panel; a compass; a washing machine; a hybrid car; a wind turbine;
        the telephone; the printing press; a thermometer; a steam engine; radio; a 3D printer; a
        submarine; a hearing aid; a microscope; a light bulb; an elevator; a rocket;
        noise-cancelling headphones; a bar code scanner; GPS; a piano; a heat pump; a parachute
        """
    ),
    "why": split_words(
        """
        is the sky blue; do leaves change colour in autumn; do cats purr; is the sea salty; do we
        dream; does bread rise; do we yawn; is ice slippery; do birds migrate; do we need sleep;
        does metal feel colder than wood; do stars twinkle; does a boat float; do onions make us
        cry; is exercise good for the heart; do prices go up; do we have leap years; does the moon
        change its shape; do languages change; is biodiversity important; do people procrastinate;
        do time zones matter; do earthquakes happen; do some people like spicy food
        """
    ),
    "computing": split_words(
        """
        recursion; a hash table; an API; machine learning; a neural network; object-oriented
        programming; a linked list; version control; a database index; encryption; cloud computing;
        a compiler; unit testing; a stack and a queue; multithreading; a web server; binary search;
        dynamic programming; an operating system; a firewall; garbage collection; a decision tree;
        big data; a blockchain; caching; inheritance; a for loop; a pointer; a Docker container;
        DNS; a REST service; overfitting; a regular expression; JSON
        """
    ),
    "history": split_words(
        """
        the French Revolution; the fall of the Roman Empire; the invention of printing; the
        Industrial Revolution; the First World War; the moon landing; the Silk Road; the
        Renaissance; the Black Death; the Great Depression; the Cold War; the building of the
        pyramids; the fall of the Berlin Wall; the American Civil War; the discovery of penicillin;
        the Age of Exploration; the Ottoman Empire; the women's suffrage movement; the Vikings; the
        Second World War; ancient Greek democracy; the Mongol Empire; the Enlightenment; the end of
        apartheid; the Meiji Restoration; the Gold Rush; the Russian Revolution
        """
    ),
    "economics": split_words(
        """
        inflation; supply and demand; interest rates; a recession; taxes; unemployment; opportunity
        cost; a monopoly; exchange rates; insurance; compound interest; public debt; free trade; a
        stock market; a budget deficit; minimum wage; tariffs; GDP; subsidies
        """
    ),
    "task": split_words(
        """
        bake bread; change a flat tyre; write a resume; grow tomatoes; learn to swim; train for a
        marathon; paint a room; remove a coffee stain; save money; fix a leaking tap; plan a
        vegetable garden; prepare for an exam; make pancakes; build a bookshelf; tie a tie;
        meditate; brew good coffee; set up a home office; sleep better; train a puppy; make a
        website; start a podcast; clean a keyboard; write a business plan; cook rice; learn the
        piano; take better photos; prepare a presentation; organise a wardrobe; reduce food waste;
        speak in public; make friends in a new city; negotiate a salary; iron a shirt; draw a face;
        back up a computer; stop biting nails; keep houseplants alive; improve handwriting; prepare
        for a job interview; create a strong password; plant a tree; lose weight safely; read more
        books; learn Spanish; assemble a bicycle; make soap; write a song; recycle
        """
    ),
    "country": split_words(
        """
        Japan; Italy; Brazil; Canada; Egypt; India; Mexico; Norway; Kenya; Australia; Portugal;
        Greece; Thailand; Peru; Germany; Morocco; Iceland; Vietnam; Spain; Turkey; France; South
        Korea; Argentina; Poland; New Zealand; Switzerland; Indonesia; Ireland; Chile; Sweden;
        China; South Africa; Hungary; Austria; Finland; Nigeria; Scotland; Cuba; Nepal; Ukraine
        """
    ),
    "business": split_words(
        """
        a small bakery; a dog-walking service; a bookshop with a cafe; a cleaning company; a mobile
        game studio; a flower shop; an online tutoring platform; a bicycle repair shop; a food
        truck; a yoga studio; a travel agency; a podcast about history; a toy store; a craft beer
        brand; a coffee shop; a photography studio; a vegan restaurant; a gym
        """
    ),
    "food": split_words(
        """
        lentils; chicken; rice; potatoes; tomatoes; eggs; chocolate; mushrooms; salmon; pasta;
        cheese; apples; beans; spinach; tofu; pumpkin; yoghurt; bread; bananas; carrots; sushi;
        honey; coffee; tea; olive oil; oats; avocado; peanuts; corn; garlic; hummus; lemons
        """
    ),
    "program": split_words(
        """
        reverses a string; checks whether a number is prime; sorts a list of numbers; counts the
        words in a text; finds the largest number in a list; converts Celsius to Fahrenheit; removes
        duplicates from a list; checks whether a word is a palindrome; computes a factorial; prints
        the Fibonacci sequence; reads a file line by line; merges two sorted lists; counts the
        vowels in a string; finds the second largest value; adds two matrices; checks whether two
        words are anagrams; generates a random password; validates an email address; computes the
        average of a list; rotates a list by k places; finds common elements of two lists; groups
        words by their first letter; flattens a nested list; finds the longest word; converts a
        number to binary; computes the greatest common divisor; implements a queue; plays rock,
        paper, scissors; draws a triangle of stars; sums the digits of a number; searches a sorted
        list; counts how often each letter occurs; parses a date; splits a bill among friends;
        simulates a dice roll; keeps a to-do list
        """
    ),
    "program2": split_words(
        """
        sort a list of names; read a CSV file; download a page; compute an average; find the
        maximum; parse a date; count words; print a table; merge two lists; send an email
        """
    ),
    "language": split_words(
        """
        Python; JavaScript; Java; C; C++; Go; Rust; Ruby; TypeScript; Bash; Python; Python;
        JavaScript; Java
        """
    ),
    "query": split_words(
        """
        the ten best customers by revenue; all orders without a payment; employees who earn more
        than their manager; the average price per category; duplicate email addresses; the newest
        post of each user; products that were never sold; the total sales per month; students with
        more than three courses; all books by one author; the second highest salary
        """
    ),
    "pattern": split_words(
        """
        a phone number; a date like 2024-05-01; an email address; a hexadecimal colour; a time of
        day; a postal code; an IP address; a word in quotes; a price in dollars; a URL
        """
    ),
    "algorithm": split_words(
        """
        binary search; bubble sort; merge sort; quicksort; breadth-first search; insertion in a
        linked list; depth-first search; the sieve of Eratosthenes; linear search; Dijkstra's
        algorithm; a hash table lookup; matrix multiplication; selection sort
        """
    ),
    "name": split_words(
        """
        Anna; Ben; Carla; David; Elena; Farid; Grace; Hiro; Ivan; Julia; Kofi; Laura; Mei; Nora;
        Omar; Paula; Quentin; Rosa; Sam; Tara; Uma; Victor; Wendy; Yusuf; Zoe
        """
    ),
    "items": split_words(
        """
        apples; books; marbles; stickers; pencils; coins; cookies; balloons; stamps; shells; cards;
        oranges; toy cars; flowers; tickets; candles; buttons; eggs; chairs
        """
    ),
    "nature": split_words(
        """
        a river; the ocean; an old oak tree; a rainforest; a coral reef; a glacier; the moon; a
        volcano; a swamp; a meadow; the wind; a thunderstorm; a desert; a lake; the Arctic; a
        mountain; a honeybee; a whale; an ant colony; a wolf; a cloud; autumn leaves; the sun; a
        mangrove forest; a waterfall; the savanna; a migrating goose; a mushroom; a sunflower
        """
    ),
}
